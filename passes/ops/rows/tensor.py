"""Rows of the op table: views, copies, indexing, creation, random numbers and conversions. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.rule import LowSums, OpRule, facts, rows, table

_SELF: Final = (0, "input", "self")
_VIEW: Final = "the same values in another shape"
_COPY: Final = "copies values: exact in any dtype"
_INTO: Final = "writes one float tensor into another: the kernel wants one dtype, the widest wins"
_CAST: Final = "a cast that the user wrote is obeyed"
_RANDOM: Final = "random numbers keep their dtype: another one draws other numbers"
_TABLE: Final = "positions and tables: low precision cannot count past 256 (bfloat16) or 2048 (float16)"
_NO_TENSOR: Final = "no tensor comes out"
_CHECK: Final = "a check: no tensor comes out, and what it looks at has its original dtype"
_SPARSE: Final = "sparse and foreign layouts have few low kernels"

TENSOR_ROWS: Final[Mapping[str, OpRule]] = table(
    # views
    rows(Rule.FOLLOW, _VIEW, "view reshape flatten unflatten squeeze unsqueeze transpose permute movedim t T H mT mH "
         "adjoint expand broadcast_to narrow select slice diagonal as_strided unfold ravel alias detach atleast_1d "
         "atleast_2d atleast_3d contiguous resolve_conj resolve_neg slice_inverse as_subclass", result="first",
         view=True),
    rows(Rule.FOLLOW, _VIEW, "view_as reshape_as expand_as", ports=_SELF, result="first", view=True),
    rows(Rule.FOLLOW, _VIEW, "chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind", result="first*",
           view=True),
    rows(Rule.FOLLOW, "a DTensor's shards, here or moved between ranks: half the traffic when low, as under autocast",
           "from_local to_local redistribute full_tensor distribute_tensor", ports=_SELF, result="first", view=True),
    rows(Rule.FOLLOW, "part of a tensor, or one of several results", "getitem", result="unknown", view=True,
         arrives=True, special="part"),
    rows(Rule.FOLLOW, "an attribute: a view, or no tensor", "getattr", result="unknown", view=True, arrives=True,
         special="attribute"),
    rows(Rule.PROMOTE, "gives every tensor in its own dtype", "broadcast_tensors", result="first*", view=True),
    rows(Rule.PROMOTE, "its kernel wants one dtype: the widest wins", "meshgrid", result="first*", view=True),
    facts("alias detach contiguous resolve_conj resolve_neg as_subclass", same=True),
    facts("flatten ravel atleast_1d atleast_2d atleast_3d contiguous resolve_conj resolve_neg", itself=True),
    facts("t T mT H mH adjoint transpose permute movedim view reshape view_as reshape_as flatten unflatten ravel "
          "squeeze unsqueeze contiguous alias expand expand_as broadcast_to", whole=True),
    facts("expand expand_as broadcast_to", repeats=True),
    facts("as_strided", strides=True),
    facts("view", bits=True, special="bits"),
    facts("unfold", backward_sums=frozenset({"cpu", "cuda"})),
    facts("broadcast_tensors meshgrid", special="each"),
    facts("contiguous", boolean=True),
    facts("reshape flatten squeeze unsqueeze transpose permute expand narrow select slice chunk split getitem detach "
          "contiguous", any_format=True),
    facts("detach", gradient=False),
    # copies
    rows(Rule.FOLLOW, _COPY, "clone flip fliplr flipud roll rot90 repeat tile repeat_interleave tril triu diag "
         "diag_embed diagflat combinations narrow_copy pin_memory lift_fresh", result="first"),
    rows(Rule.FOLLOW, _COPY, "gather index_select take take_along_dim masked_select index", ports=_SELF,
           result="first"),
    rows(Rule.FOLLOW, "a number is written in the tensor's own dtype", "masked_fill index_fill fill fill_diagonal "
           "zero", ports=_SELF, result="first"),
    rows(Rule.FOLLOW, "converts to its target's dtype while copying", "copy", ports=_SELF, result="first",
         native_promotion=True, arrives=True),
    rows(Rule.PROMOTE, _INTO, "index_put setitem scatter scatter_add scatter_reduce index_add index_copy index_reduce "
           "masked_scatter put select_scatter slice_scatter diagonal_scatter as_strided_scatter map map2",
           result="first"),
    rows(Rule.KEEP, "changes the memory of the tensor itself", "set resize resize_as resize_as_sparse requires_grad "
           "share_memory delitem apply", result="first"),
    facts("clone pin_memory lift_fresh", same=True),
    facts("clone flip fliplr flipud roll rot90 repeat tile repeat_interleave tril triu diag diag_embed narrow_copy "
          "gather index_select take take_along_dim masked_select index", exact=True),
    facts("take index", backward_sums=frozenset({"cpu"})),
    facts("gather index_select", indices=(2, "index")),
    facts("scatter scatter_add scatter_reduce index_add index_copy index_reduce", places=(2, "index")),
    facts("index_put setitem put", places=(1, "indices", "index")),
    # a CPU's kernels add up in FP32 what is not named here; a GPU's add atomically, in the dtype that memory has
    facts("index_put put", sums_low=LowSums(cpu=(True,), option=(3, "accumulate"))),
    facts("index_add", sums_low=LowSums(cpu=(None,), cuda=(None,))),
    facts("scatter_add", sums_low=LowSums(cuda=(None,))),
    facts("index_reduce", sums_low=LowSums(("mean", "prod"), ("mean", "prod"), (4, "reduce"))),
    facts("scatter_reduce", sums_low=LowSums(cuda=("sum", "mean", "prod"), option=(4, "reduce"))),
    facts("scatter", sums_low=LowSums(cuda=("add", "multiply"), option=(4, "reduce"))),
    facts("masked_fill index_fill fill fill_diagonal", numbers="fill"),
    facts("setitem", numbers="compared"),  # a number that stands in place of values, as one of where does
    facts("clone masked_fill", boolean=True),
    # casts
    rows(Rule.KEEP, _CAST, "to", result="unknown", view=True, same=True, arrives=True, special="cast", rank="kept"),
    facts("to", any_format=True, itself=True, guard="x.float().clamp(-65504, 65504).to(torch.float16)  # the model "
          "itself casts to float16: clamp before that, or cast to torch.bfloat16"),
    # creation
    rows(Rule.FOLLOW, "constants in the dtype of their example", "zeros_like ones_like empty_like full_like new_zeros "
         "new_ones new_empty new_full new_empty_strided new", ports=_SELF, result="first"),
    rows(Rule.KEEP, _TABLE, "arange range linspace logspace", result="unknown"),
    rows(Rule.KEEP, _TABLE, "eye hann_window hamming_window bartlett_window blackman_window kaiser_window",
           result="default"),
    rows(Rule.KEEP, "made in the dtype that its call gives", "zeros ones empty empty_strided empty_permuted",
           result="default"),
    rows(Rule.KEEP, "made in the dtype that its call gives", "full tensor as_tensor asarray scalar_tensor new_tensor "
           "from_numpy frombuffer", result="unknown"),
    rows(Rule.KEEP, _TABLE, "tril_indices triu_indices", result="int64"),
    rows(Rule.KEEP, _TABLE, "vander", result="first"),
    facts("full_like new_full full tensor new_tensor scalar_tensor", numbers="fill"),
    # fill and zero write their first argument, whose old values nobody reads
    facts("zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_empty_strided new fill "
          "zero", example=True),
    facts("as_tensor asarray from_numpy", view=True),
    facts("arange", special="sequence"),
    facts("arange range linspace logspace", counts=True),
    facts("range linspace logspace", special="float_sequence"),
    facts("full", special="full"),
    facts("tensor as_tensor asarray", special="constant"),
    facts("scalar_tensor new_tensor", special="like"),
    # random numbers
    rows(Rule.KEEP, _RANDOM, "rand randn", result="default"),
    rows(Rule.KEEP, _RANDOM, "randint randperm multinomial", result="int64"),
    rows(Rule.KEEP, _RANDOM, "rand_like randn_like randint_like bernoulli poisson binomial uniform cauchy exponential "
           "geometric log_normal random philox_normal philox_uniform", result="first"),
    rows(Rule.KEEP, _RANDOM, "normal"),
    facts("rand randn randint randperm rand_like randn_like randint_like bernoulli poisson binomial uniform cauchy "
          "exponential geometric log_normal random philox_normal philox_uniform normal multinomial", random=True),
    facts("normal", special="normal"),
    # no tensors
    rows(Rule.KEEP, _NO_TENSOR,
         "size shape stride dim numel storage_offset item tolist numpy element_size nbytes itemsize data_ptr "
         "const_data_ptr tensor_version get_device is_floating_point is_complex is_conj is_neg is_signed is_inference "
         "is_nonzero is_same_size is_set_to is_contiguous is_coalesced is_pinned is_shared is_tensor "
         "is_storage is_distributed is_grad_enabled is_inference_mode_enabled len length_hint sequence_concat "
         "countOf indexOf result_type promote_types can_cast broadcast_shapes get_default_dtype typename "
         "dense_dim sparse_dim dim_order storage storage_type typed_storage untyped_storage is_view qscheme "
         "sym_max sym_min sym_not sym_float sym_int sym_ite sym_sqrt sym_sum nnz", ports=(), result="none"),
    rows(Rule.KEEP, _CHECK, "assert assert_async assert_scalar assert_tensor_metadata functional_assert_async "
         "functional_assert_scalar check check_value check_type check_index check_is_size check_not_implemented "
         "sym_constrain_range sym_constrain_range_for_size", result="none", reads_values=True),
    facts("element_size numpy tolist item storage typed_storage untyped_storage data_ptr", reads_values=True),
    facts("item", gradient=False),
    facts("size shape dim numel len is_floating_point", any_format=True),
    facts("sym_float sym_sqrt", float_number=True),
    # sparse tensors
    rows(Rule.KEEP, _SPARSE, "to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc to_dense "
         "to_mkldnn to_padded_tensor coalesce sparse_mask sparse_resize sparse_resize_and_clear sspaddmm smm hspmm "
         "values", result="first"),
    rows(Rule.KEEP, _SPARSE, "indices crow_indices col_indices ccol_indices row_indices", result="int64"),
    rows(Rule.KEEP, _SPARSE, "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor "
         "sparse_bsc_tensor sparse_compressed_tensor", result="unknown"),
    facts("to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc coalesce sparse_mask "
          "sspaddmm hspmm sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor "
          "sparse_compressed_tensor", layout="sparse"),
    facts("to_dense values indices crow_indices col_indices ccol_indices row_indices", layout="dense"),
    rows(Rule.KEEP, "takes indices apart", "unravel_index", result="int64*"),
)  # fmt: skip
