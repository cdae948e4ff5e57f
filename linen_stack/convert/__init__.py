"""Trees between layouts: layers one by one, stacked, and stacked in another way. Everything follows from the plan.

    layers = ls.convert.unstack(variables, plan)                 # one tree per layer, and layers.rest
    variables = ls.convert.stack(layers, plan)                   # the inverse
    variables = ls.convert.restack(variables, plan, other_plan)  # the same layers, laid out for another plan
    axes = ls.convert.layer_axes(plan, params)                   # which axes of a leaf count layers, and which

A tree may be params, variables of all collections, an optimiser's state, or a container of several of these: the
layers are found by the names of the plan's segments (`linen_stack.convert.sites` says how), and what is no layer's
passes through as it is. Every leaf of a layer goes to one place, bit for bit. A leaf that is not stacked as the plan
says, a layer that is missing and a part that is left over are errors, which list paths and shapes and guess what the
tree is.

Leaves may be numpy arrays, memory maps, readers, jax arrays in any memory and with any sharding, or
`ShapeDtypeStruct`s (`linen_stack.convert.arrays`), in boxes of partition metadata or without. `lazy=True` makes trees
of `Lazy` leaves, each read and made when it is asked for, so that a model larger than memory can be converted leaf by
leaf or layer by layer.

These arguments are common to all functions:

    plan               a plan, or a `StackedDecoder` or a model around one, which know their `param_axis` and `scan`
    param_axis         where params, and copies of them in an optimiser's state, are stacked. Default 0
    scan               False for layers that stand one by one, as `<segment>_<i>`. Default True
    within             keys of the module that holds the layers ("decoder"), where several have segments of these names
    collection_axes    where collections other than params are stacked, by name; those that are not named, on axis 0
    shared             `shared(path in the layer's tree, leaf)` is True for leaves below a segment that are not
                       stacked, but one for all its layers
    allow_missing      let layers have no params
"""
from linen_stack.convert.arrays import Lazy
from linen_stack.convert.axes import LayerAxes, layer_axes
from linen_stack.convert.layout import Layout, Place, index_map
from linen_stack.convert.trees import Layers, restack, stack, unstack

__all__ = ["LayerAxes", "Layers", "Layout", "Lazy", "Place", "index_map", "layer_axes", "restack", "stack", "unstack"]
