"""Documents and the prompts drawn from them."""
