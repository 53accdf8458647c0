"""Witnesses: other people's implementations of the same step, under the same meter. Their order is their own."""
