"""Other people's implementations by arithmetic: each cuts, holds and sends in its own way, and its order is its own."""
