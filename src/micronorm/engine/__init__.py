"""The training engine: optimizer steps as transactions, cut as memory allows, resumable at any moment."""
