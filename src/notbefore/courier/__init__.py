"""How changes reach those who asked for them."""
