"""Conversion of networks, and of other people's weights."""
