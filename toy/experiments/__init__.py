"""One module per figure of the toy-model sources; `experiment` says what they share and runs them."""
