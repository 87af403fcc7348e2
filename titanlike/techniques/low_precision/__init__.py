"""float8 and mxfp8: linear layers and experts in low precision."""
