"""What is trained on: text, token files, random tokens, or a user's own."""
