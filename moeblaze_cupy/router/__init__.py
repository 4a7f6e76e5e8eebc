"""The router: the experts of each token and their weights, and the gradient of its logits.

May import what `selection` may, and `selection`. Touches no framework but through `cuda`.
"""
