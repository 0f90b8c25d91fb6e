"""Derives row programs, forward and backward, from the graph of a region.

To be read in this order: ``values`` and ``row_program`` define them, ``layout`` says where rows and columns lie,
``lowering`` turns torch's ops into values, ``forward`` and ``backward`` make the programs, ``prices`` decides on a CPU.
"""
