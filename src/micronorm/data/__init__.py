"""Readers of data sets in their official formats, generated data, and augmentation keyed by sample.

Losses and scores are in `micronorm.tasks`. Nothing here draws from a global random generator.
"""
