"""Adapters for other people's trainers: MONAI's layer factory and nnU-Net's trainer class.

Each module imports its package when it is used. Layers are in `micronorm.nn`, conversion in `micronorm.convert`.
"""
