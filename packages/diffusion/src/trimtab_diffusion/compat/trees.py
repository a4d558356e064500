"""Functions on nested dicts, lists and tuples, as torch 2.11 to 2.13 has them in `torch.utils._pytree`.

Each raises a ValueError where trees have different structures. None is a leaf.
"""

from torch.utils._pytree import tree_leaves, tree_map, tree_map_with_path

__all__ = ["tree_leaves", "tree_map", "tree_map_with_path"]
