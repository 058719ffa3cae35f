"""What the sources claim, and the rules that judge it by results."""
