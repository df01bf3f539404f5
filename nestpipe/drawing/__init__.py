"""Drawings of one step of a schedule."""
