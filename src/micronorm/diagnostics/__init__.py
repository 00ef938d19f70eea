"""Measurements that show why a network trains badly, the diagnosis built on them, and the observer `mn.observe`.

The measurements read models and never change them. Training loops and figures are in `engine` and `recipes`.
"""
