"""Cluster files that come with zrt."""
