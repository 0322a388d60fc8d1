"""Paged attention behind transformers' AttentionInterface: the interface, and one file a kernel."""
