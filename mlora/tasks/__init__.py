"""What a row means: rendering, tokens and labels."""
