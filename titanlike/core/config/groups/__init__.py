"""The keys of each group of the config, as dataclasses, a file for each subject. `schema` composes them."""
