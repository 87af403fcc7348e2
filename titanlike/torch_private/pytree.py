"""torch's pytree functions: nested tuples, lists, dicts and registered classes of leaves."""

from torch.utils import _pytree

GetAttrKey, MappingKey = _pytree.GetAttrKey, _pytree.MappingKey
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_flatten_with_path, tree_leaves = _pytree.tree_flatten_with_path, _pytree.tree_leaves
