"""Readers of data sets in their official formats."""
