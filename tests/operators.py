"""A table of operators, run forward and backward: each must ask a simulated card for what it asks of torch's allocator.

`tests/cuda/test_sequences.py` compares the two; `tests/simulation/test_operators.py` holds the simulated card to what is stated here by
hand for some of each family: the peak, and the dtype under autocast.

A case takes what makes its tensors (`sequences.Tensors`) and returns its results. EXCEPTIONS names the variants that differ,
and why; what differs altogether is not in the table, and so named in a note when it takes part near a peak.
"""

from functools import partial

import torch
from sequences import VARIANTS
from torch import nn
from torch.nn import functional as F

ROWS = (200, 3000)
IMAGES = (8, 64, 56, 56)
SMALL_IMAGES = (8, 64, 28, 28)
CASES = {}


def add(prefix="", **cases):
    for name, case in cases.items():
        CASES[f"{prefix}{name}"] = case


def building(build):
    """Mark a case whose parameters are made while a model is built; it returns its step."""
    build.builds = True
    return build


# Cases that count elements: the bed's kernels do not, and a count is what its memory holds, 0 in a fresh process.
COUNTING = {
    "nonzero": lambda _: torch.zeros(200, 3000, dtype=torch.bool, device="cuda").nonzero(),
    "nonzero_of_few": lambda _: torch.zeros(64, 64, dtype=torch.int64, device="cuda").nonzero(),
    "index_by_mask": lambda make: make(200, 3000)[
        torch.zeros(200, 3000, dtype=torch.bool, device="cuda")
    ],
    "masked_select": lambda make: make(200, 3000).masked_select(
        torch.zeros(3000, dtype=torch.bool, device="cuda")
    ),
    "masked_scatter": lambda make: make(200, 3000).masked_scatter(
        torch.zeros(200, 1, dtype=torch.bool, device="cuda"), make(200, 3000)
    ),
}

# --- elementwise ---

ACTIVATIONS = (
    "relu gelu silu sigmoid tanh softplus leaky_relu elu hardswish hardtanh hardsigmoid mish selu celu relu6 softsign "
    "logsigmoid tanhshrink softshrink hardshrink glu"
)
UNARY = (
    "exp log sqrt rsqrt abs sin cos erf log1p expm1 neg reciprocal sign square tan atan floor round trunc frac sinh cosh "
    "asin acos nan_to_num isnan isfinite logit exp2 log2 log10"
)
BINARY = "add mul sub div maximum minimum fmod remainder hypot eq lt logaddexp fmin fmax xlogy"


def split_into(parts, tensor):
    torch.split_with_sizes_copy(tensor, [part.shape[1] for part in parts], 1, out=parts)


def of_one(of):
    return lambda make: of(make(*ROWS))


def of_two(of, shape=ROWS):
    return lambda make: of(make(*ROWS), make(*shape))


for name in ACTIVATIONS.split():
    CASES[name] = of_one(getattr(F, name))
for name in UNARY.split():
    CASES[name] = of_one(getattr(torch, name))
for name in BINARY.split():
    CASES[name] = of_two(getattr(torch, name))
    CASES[f"{name}, broadcast"] = of_two(getattr(torch, name), ROWS[1:])
add(
    power=lambda make: make(*ROWS) ** 3,
    power_of_tensors=lambda make: make(*ROWS) ** make(*ROWS),
    number_to_a_power=lambda make: 10_000 ** make(*ROWS),
    clamp=lambda make: make(*ROWS).clamp(-1, 1),
    where=lambda make: torch.where(make(*ROWS) > 0, make(*ROWS), make(*ROWS)),
    where_a_number=lambda make: torch.where(make(*ROWS) > 0, make(*ROWS), 0.0),
    masked_fill=lambda make: make(*ROWS).masked_fill(make(*ROWS, grad=False) > 0, float("-inf")),
    addcmul=lambda make: torch.addcmul(make(*ROWS), make(*ROWS), make(*ROWS)),
    addcdiv=lambda make: torch.addcdiv(make(*ROWS), make(*ROWS), make(*ROWS)),
    lerp=lambda make: torch.lerp(make(*ROWS), make(*ROWS), 0.3),
    dropout=lambda make: F.dropout(make(*ROWS), 0.1),
    dropout_of_nothing=lambda make: F.dropout(make(*ROWS), 0.0),
    dropout_in_evaluation=lambda make: F.dropout(make(*ROWS), 0.1, training=False) * 1,
    dropout_of_channels=lambda make: F.dropout2d(make(*IMAGES), 0.1),
    prelu=lambda make: F.prelu(make(*IMAGES), make(64)),
    prelu_of_one=lambda make: F.prelu(make(*IMAGES), make(1)),
    whole_division=lambda make: make.indices(2000) // 3,
    to_host=lambda make: make(*ROWS).detach().cpu(),
    rows_to_host=lambda make: make(*ROWS, grad=False)[:, :7].cpu(),
    picture_to_host=lambda make: (
        make(64, 60, 3, grad=False).permute(2, 0, 1).to("cpu", torch.uint8)
    ),
    picture_from_host=lambda _: (
        torch.ones(4, 3, 64, 64).to(memory_format=torch.channels_last).to("cuda", torch.half)
    ),
    layout_from_host=lambda _: torch.ones(4, 3, 64, 64).to(
        "cuda", memory_format=torch.channels_last
    ),
    columns_from_host=lambda make: make(*ROWS, grad=False)[:, :7].copy_(torch.ones(200, 7)),
)

# --- norms ---


def batch_norm(make, *shape, train=True, dtype=torch.float32):
    channels = shape[1]
    running = [torch.zeros(channels, device="cuda", dtype=dtype) for _ in range(2)]
    weights = [make(channels, dtype=dtype) for _ in range(2)]
    return F.batch_norm(make(*shape), *running, *weights, train)


def group_norm(groups, *shape, weights=True):
    def case(make):
        pair = (make(shape[1]), make(shape[1])) if weights else ()
        return F.group_norm(make(*shape), groups, *pair)

    return case


add(
    layer_norm=lambda make: F.layer_norm(make(2000, 768), (768,), make(768), make(768)),
    layer_norm_of_images=lambda make: F.layer_norm(make(*IMAGES), IMAGES[1:]),
    layer_norm_of_permuted_images=lambda make: F.layer_norm(
        make(*IMAGES).permute(0, 2, 3, 1), (64,)
    ),
    rms_norm=lambda make: F.rms_norm(make(20, 100, 768), (768,), make(768)),
    group_norm=group_norm(8, *IMAGES),
    group_norm_without_weights=group_norm(8, *IMAGES, weights=False),
    group_norm_of_channels=group_norm(64, *IMAGES),
    group_norm_of_vectors=group_norm(8, 256, 640),
    batch_norm=lambda make: batch_norm(make, *IMAGES),
    batch_norm_with_weights_of_its_dtype=lambda make: batch_norm(make, *IMAGES, dtype=make.dtype),
    batch_norm_evaluated=lambda make: batch_norm(make, *IMAGES, train=False),
    instance_norm=lambda make: F.instance_norm(make(*IMAGES)),
    local_response_norm=lambda make: F.local_response_norm(make(*IMAGES), 5),
    normalize=lambda make: F.normalize(make(*ROWS)),
    vector_norm=lambda make: torch.linalg.vector_norm(make(*ROWS)),
    norm_of_absolutes=lambda make: make(*ROWS).norm(p=1),
    weight_norm=lambda make: torch._weight_norm(make(512, 512), make(512, 1), 0),
)

# --- softmax, sorts, reductions ---

OF_ALL = "sum mean nansum var norm max argmax count_nonzero diff clone half float"
OF_ROWS = "logsumexp cumsum cummax sort argsort median nanmedian max amax argmax var prod"


def of_rows(of):
    return lambda make: of(make(*ROWS), -1)


for name in OF_ALL.split():
    CASES[name] = of_one(getattr(torch.Tensor, name))
for name in OF_ROWS.split():
    CASES[f"{name} of rows"] = of_rows(getattr(torch, name))
add(
    softmax=lambda make: make(1000, 4000).softmax(-1),
    softmax_of_channels=lambda make: make(*IMAGES).softmax(1),
    log_softmax=lambda make: make(1000, 4000).log_softmax(-1),
    log_softmax_of_channels=lambda make: make(*IMAGES).log_softmax(1),
    softmax_in_float32=lambda make: make(1000, 4000).softmax(-1, dtype=torch.float32),
    gumbel_softmax=lambda make: F.gumbel_softmax(make(*ROWS), dim=-1),
    cumsum_of_channels=lambda make: make(*IMAGES).cumsum(1),
    cumsum_of_a_vector=lambda make: make(3_000_000).cumsum(0),
    sort_short_rows=lambda make: make(2000, 500).sort(-1),
    sort_long_rows=lambda make: make(200, 5000).sort(-1),
    sort_a_vector=lambda make: make(1_000_000).sort(),
    sort_columns=lambda make: make(3000, 200).sort(0),
    argsort_tiny_rows=lambda make: make(20_000, 16).argsort(-1, descending=True),
    topk=lambda make: make(*ROWS).topk(5),
    topk_of_short_rows=lambda make: make(20_000, 8).topk(2),
    topk_of_a_vector=lambda make: make(1_000_000).topk(100),
    topk_of_many=lambda make: make(100, 20_000).topk(5000),
    topk_of_a_vector_of_many=lambda make: make(300_000).topk(70_000),
    topk_of_channels=lambda make: make(*IMAGES).topk(2, 1),
    kthvalue=lambda make: make(*ROWS).kthvalue(5),
    aminmax=lambda make: torch.aminmax(make(*ROWS)),
    sum_of_columns=lambda make: make(20_000, 1024).sum(0),
    sum_of_rows=lambda make: make(20, 100_000).sum(-1),
    sum_of_booleans=lambda make: (make(*ROWS) > 0).sum(),
    mean_of_images=lambda make: make(*IMAGES).mean((2, 3)),
    std_of_rows=lambda make: make(*ROWS).std(-1, keepdim=True),
    var_mean=lambda make: torch.var_mean(make(*ROWS), -1),
    any=lambda make: (make(*ROWS) > 0).any(),
    all_of_rows=lambda make: (make(*ROWS) > 0).all(-1),
)

# --- losses ---


def pair(make, *shape):
    return make(*shape), make(*shape, grad=False)


def with_logits(make, **options):
    return F.binary_cross_entropy_with_logits(*pair(make, *ROWS), **options)


def classified(make, **options):
    return F.cross_entropy(make(*ROWS), make.indices(200), **options)


def compared(of, reduction):
    return lambda make: of(*pair(make, *ROWS), reduction=reduction)


for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss"):
    for reduction in ("mean", "none", "sum"):
        CASES[f"{name}, {reduction}"] = compared(getattr(F, name), reduction)
add(
    cross_entropy=classified,
    cross_entropy_smoothed=lambda make: classified(make, label_smoothing=0.1),
    cross_entropy_weighted=lambda make: classified(make, weight=make(3000, grad=False)),
    cross_entropy_of_shares=lambda make: F.cross_entropy(*pair(make, *ROWS)),
    cross_entropy_of_images=lambda make: F.cross_entropy(
        make(8, 21, 128, 128), make.indices(8, 128, 128)
    ),
    binary_cross_entropy=lambda make: F.binary_cross_entropy(
        make(*ROWS).sigmoid(), make(*ROWS, grad=False)
    ),
    binary_cross_entropy_of_each=lambda make: F.binary_cross_entropy(
        make(*ROWS).sigmoid(), make(*ROWS, grad=False), reduction="none"
    ),
    logits=with_logits,
    logits_weighted=lambda make: with_logits(make, weight=make(*ROWS, grad=False)),
    logits_with_positives=lambda make: with_logits(make, pos_weight=make(3000, grad=False)),
    kl_div=lambda make: F.kl_div(
        make(*ROWS).log_softmax(-1), make(*ROWS, grad=False), reduction="batchmean"
    ),
    cosine_similarity=lambda make: F.cosine_similarity(make(*ROWS), make(*ROWS)),
    pairwise_distance=lambda make: F.pairwise_distance(make(*ROWS), make(*ROWS)),
)

# --- products ---

add(
    linear=lambda make: F.linear(make(200, 300), make.weight(400, 300), make.weight(400)),
    linear_without_bias=lambda make: F.linear(make(20, 100, 300), make.weight(400, 300)),
    matmul=lambda make: make(200, 300) @ make(300, 400),
    matmul_of_heads=lambda make: make(8, 4, 200, 64) @ make(8, 4, 200, 64).transpose(-1, -2),
    bmm=lambda make: torch.bmm(make(8, 200, 300), make(8, 300, 400)),
    baddbmm=lambda make: torch.baddbmm(make(8, 200, 400), make(8, 200, 300), make(8, 300, 400)),
    mv=lambda make: make(200, 300) @ make(300),
    dot=lambda make: make(300_000) @ make(300_000),
    einsum_of_heads=lambda make: torch.einsum(
        "bqhd,bkhd->bhqk", make(4, 100, 8, 64), make(4, 100, 8, 64)
    ),
    cross=lambda make: torch.linalg.cross(make(20_000, 3), make(20_000, 3)),
    cdist=lambda make: torch.cdist(make(200, 64), make(300, 64)),
    cdist_of_batches=lambda make: torch.cdist(make(8, 128, 3), make(8, 128, 3)),
    cdist_of_few=lambda make: torch.cdist(make(20, 64), make(20, 64)),
)

# --- images ---


def convolved(weight, *shape, bias=True, **options):
    def case(make):
        of = (F.conv1d, F.conv2d, F.conv3d)[len(shape) - 3]
        return of(
            make(*shape), make.weight(*weight), make.weight(weight[0]) if bias else None, **options
        )

    return case


def transposed(weight, *shape):
    def case(make):
        of = (F.conv_transpose1d, F.conv_transpose2d)[len(shape) - 3]
        return of(make(*shape), make.weight(*weight), make.weight(weight[1]), stride=2, padding=1)

    return case


def resized(mode, *shape, **options):
    return lambda make: F.interpolate(make(*shape), **{"scale_factor": 2} | options, mode=mode)


def padded(mode, *shape):
    return lambda make: F.pad(make(*shape), (1, 1) * (len(shape) - 2), mode=mode)


def permuted(make):
    """Return what a convolution computes as tokens: its gradient has channels last."""
    return (
        convolved((64, 32, 3, 3), *CHANNELS, padding=1)(make).permute(0, 2, 3, 1).reshape(8, -1, 64)
        * 2
    )


CHANNELS = (8, 32, 56, 56)
VOLUMES = (2, 16, 16, 28, 28)
for name in ("max_pool", "avg_pool"):
    for dims, shape in enumerate([(8, 64, 560), IMAGES, VOLUMES], 1):
        pool = getattr(F, f"{name}{dims}d")
        CASES[f"{name}{dims}d"] = lambda make, of=pool, shape=shape: of(make(*shape), 2)
for mode in ("bilinear", "nearest", "bicubic"):
    CASES[mode] = resized(mode, *SMALL_IMAGES)
for mode in ("constant", "reflect", "replicate", "circular"):
    CASES[f"pad, {mode}"] = padded(mode, *SMALL_IMAGES)
add(
    conv1d_depthwise=convolved((64, 1, 15), 16, 64, 1000, padding=7, groups=64),
    conv1d_depthwise_of_tokens=lambda make: F.conv1d(
        make(16, 1000, 64).transpose(1, 2), make.weight(64, 1, 15), padding=7, groups=64
    ).transpose(1, 2),
    conv2d=convolved((64, 32, 3, 3), *CHANNELS, padding=1),
    conv2d_depthwise=convolved((32, 1, 3, 3), *CHANNELS, padding=1, groups=32),
    conv2d_grouped=convolved((64, 8, 3, 3), *CHANNELS, padding=1, groups=4),
    conv2d_to_tokens=permuted,
    conv2d_same=convolved((64, 32, 4, 4), *CHANNELS, padding="same"),
    conv3d=convolved((32, 16, 3, 3, 3), *VOLUMES, padding=1),
    conv_transpose1d=transposed((32, 16, 4), 8, 32, 280),
    conv_transpose2d=transposed((32, 16, 4, 4), 8, 32, 28, 28),
    adaptive_avg_pool1d=lambda make: F.adaptive_avg_pool1d(make(8, 64, 560), 7),
    adaptive_avg_pool2d=lambda make: F.adaptive_avg_pool2d(make(*IMAGES), 7),
    adaptive_avg_pool2d_to_one=lambda make: F.adaptive_avg_pool2d(make(*IMAGES), 1),
    adaptive_avg_pool3d=lambda make: F.adaptive_avg_pool3d(make(*VOLUMES), 2),
    adaptive_max_pool2d=lambda make: F.adaptive_max_pool2d(make(*IMAGES), 7),
    bilinear_antialiased=resized("bilinear", *SMALL_IMAGES, antialias=True),
    linear_resized=resized("linear", 8, 64, 280),
    nearest_of_sequences=resized("nearest", 8, 64, 280),
    trilinear=resized("trilinear", 2, 8, 8, 28, 28),
    nearest_of_volumes=resized("nearest", 2, 8, 8, 28, 28),
    grid_sample=lambda make: F.grid_sample(
        make(*SMALL_IMAGES), make(8, 30, 30, 2), align_corners=False
    ),
    pad_sequences_by_reflection=padded("reflect", 8, 64, 280),
    pixel_shuffle=lambda make: F.pixel_shuffle(make(*SMALL_IMAGES), 2).contiguous(),
    pixel_unshuffle=lambda make: F.pixel_unshuffle(make(*SMALL_IMAGES), 2),
    unfold=lambda make: F.unfold(make(8, 16, 28, 28), 3),
    unfold_a_tensor=lambda make: make(8, 2800).unfold(1, 10, 5),
    to_channels_last=lambda make: make(*IMAGES).to(memory_format=torch.channels_last),
)

# --- indices ---


def assigned(make):
    rows = make(5000, 100) * 1
    rows[make.indices(200)] = make(200, 100)
    return rows


def packed(make):
    lengths = torch.tensor([40, 31, 31, 9])
    rows = nn.utils.rnn.pack_padded_sequence(make(4, 40, 1000), lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(rows._replace(data=rows.data * 2))[0]


def aligned(make, read=lambda lengths: lengths):
    classes = make(50, 8, 1000).log_softmax(-1)
    lengths = read(torch.full((8,), 50)), read(torch.tensor([20, 3, 7, 20, 1, 9, 9, 12]))
    return F.ctc_loss(classes, make.indices(8, 20), *lengths, blank=999, reduction="none")


add(
    ctc=aligned,
    ctc_of_lists=lambda make: aligned(make, torch.Tensor.tolist),
    packed_sequences=packed,
    packed_sequences_of_one_length=lambda make: nn.utils.rnn.pack_padded_sequence(
        make(40, 4, 1000), torch.full((4,), 40)
    )[0],
    embedding=lambda make: F.embedding(make.indices(2000), make.weight(5000, 100)),
    embedding_of_many=lambda make: F.embedding(make.indices(100_000), make.weight(5000, 100)),
    embedding_of_32_bits=lambda make: F.embedding(
        make.indices(100_000, dtype=torch.int32), make.weight(5000, 100)
    ),
    embedding_bag=lambda make: F.embedding_bag(make.indices(1000, 20), make.weight(5000, 100)),
    embedding_bag_of_largest=lambda make: F.embedding_bag(
        make.indices(1000, 20), make.weight(5000, 100), mode="max"
    ),
    index_select=lambda make: make(5000, 100).index_select(0, make.indices(20_000)),
    rows_of_32_bits=lambda make: make(5000, 100)[make.indices(20_000, dtype=torch.int32)],
    many_rows=lambda make: make(5000, 100)[make.indices(200_000)],
    columns=lambda make: make(5000, 100)[:, make.indices(50)],
    elements=lambda make: make(500, 500)[make.indices(20_000), make.indices(20_000)],
    elements_by_32_bits=lambda make: make(500, 500)[
        (make.indices(200_000, dtype=torch.int32),) * 2
    ],
    gather=lambda make: make(*ROWS).gather(1, make.indices(200, 10)),
    take=lambda make: make(*ROWS).take(make.indices(200, 10)),
    scatter=lambda make: make(*ROWS).scatter(1, make.indices(200, 10), make(200, 10)),
    scatter_add=lambda make: make(*ROWS).scatter_add(1, make.indices(200, 10), make(200, 10)),
    scatter_largest=lambda make: make(*ROWS).scatter_reduce(
        1, make.indices(200, 10), make(200, 10), "amax"
    ),
    scatter_mean=lambda make: make(*ROWS).scatter_reduce(
        1, make.indices(200, 10), make(200, 10), "mean"
    ),
    index_add=lambda make: make(5000, 100).index_add(0, make.indices(20_000), make(20_000, 100)),
    index_copy=lambda make: make(5000, 100).index_copy(0, make.indices(200), make(200, 100)),
    index_fill=lambda make: make(5000, 100).index_fill(0, make.indices(200), 1.0),
    assigned_rows=assigned,
    repeat_interleave=lambda make: make(500, 100).repeat_interleave(4, 0),
    one_hot=lambda make: F.one_hot(make.indices(2000), 100),
    bucketize=lambda make: torch.bucketize(make(*ROWS), make(100, grad=False)),
    searchsorted=lambda make: torch.searchsorted(
        make(200, 100, grad=False), make(*ROWS, grad=False)
    ),
)

# --- shapes and random numbers ---

add(
    roll=lambda make: make(*IMAGES).roll(1, 2),
    flip=lambda make: make(*ROWS).flip(1),
    rot90=lambda make: make(8, 3, 64, 64).rot90(1, (2, 3)),
    tril=lambda make: make(8, 300, 300).tril(),
    triu=lambda make: make(300, 300).triu(1),
    cat=lambda make: torch.cat([make(*ROWS), make(*ROWS)], 1),
    cat_of_two_dtypes=lambda make: torch.cat([make(*ROWS), make(*ROWS, dtype=torch.float32)]),
    stack=lambda make: torch.stack([make(*ROWS), make(*ROWS)], 1),
    split=lambda make: make(*ROWS).split(1000, 1),
    split_copy=lambda make: split_into(
        [make(20, size, grad=False) for size in (1000, 1500, 500)], make(20, 3000, grad=False)
    ),
    chunk_cat=lambda make: torch._chunk_cat(
        [make(30, 3000, grad=False), make(17, 500, grad=False)], 0, 4
    ),
    chunk_cat_into=lambda make: torch._chunk_cat(
        [make(32, 3000, grad=False), make(16, 500, grad=False)],
        0,
        4,
        out=make(4, 26_000, grad=False),
    ),
    unbind=lambda make: make(4, *ROWS).unbind(0),
    repeat=lambda make: make(50, 300).repeat(4, 2),
    permute=lambda make: make(*IMAGES).permute(0, 2, 3, 1).contiguous(),
    diagonal=lambda make: make(300, 300).diagonal(),
    diag_embed=lambda make: make(20, 300).diag_embed(),
    resize=lambda make: make(16, grad=False).resize_(2**20),
    randn=lambda make: torch.randn(*ROWS, device="cuda", dtype=make.dtype),
    randn_like=lambda make: make(*ROWS) + torch.randn_like(make(*ROWS)),
    rand=lambda make: torch.rand(*ROWS, device="cuda", dtype=make.dtype),
    randint=lambda make: torch.randint(0, 10, ROWS, device="cuda"),
    randperm=lambda make: torch.randperm(200_000, device="cuda"),
    bernoulli=lambda make: torch.bernoulli(make(*ROWS, grad=False)),
    normal=lambda make: torch.normal(make(*ROWS, grad=False), 1.0),
    normal_of_deviations=lambda make: torch.normal(0.0, make(*ROWS, grad=False)),
    normal_of_tensors=lambda make: torch.normal(make(*ROWS, grad=False), make(*ROWS, grad=False)),
    multinomial=lambda make: torch.multinomial(torch.ones(200, 3000, device="cuda"), 1),
    multinomial_of_many=lambda make: torch.multinomial(
        torch.ones(200, 3000, device="cuda"), 20, replacement=True
    ),
    linspace=lambda make: torch.linspace(0, 1, 300_000, device="cuda"),
    full=lambda make: torch.full(ROWS, 1.0, device="cuda"),
    eye=lambda make: torch.eye(300, device="cuda"),
    complex=lambda make: torch.view_as_real(
        torch.view_as_complex(make(20, 100, 32, 2))
        * torch.polar(make(100, 32, grad=False), make(100, 32, grad=False))
    ),
)

# --- attention ---


def attended(*, width=64, mask=None, dropout=0.0, causal=False, length=200, keys=None):
    def case(make):
        query = make(4, 8, length, width)
        key, value = (make(4, 8, keys or length, width) for _ in range(2))
        bias = None
        if mask == "booleans":
            bias = torch.ones(length, keys or length, device="cuda", dtype=torch.bool)
        elif mask is not None:
            bias = make(4, 1, length, keys or length, grad=False)
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, causal)

    return case


def attended_by_groups(make):
    query, key, value = make(4, 8, 200, 64), make(4, 2, 200, 64), make(4, 2, 200, 64)
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def attended_at_once(make):
    query, key, value = make(4, 200, 3, 8, 64).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(4, 200, 512)


def multihead(make, **options):
    layer = nn.MultiheadAttention(64, 4, batch_first=True, device="cuda", dtype=make.dtype)
    tokens = make(8, 100, 64)
    return layer(tokens, tokens, tokens, **options)[0]


add(
    "attention: ",
    plain=attended(),
    causal=attended(causal=True),
    dropout=attended(dropout=0.1),
    booleans=attended(mask="booleans"),
    mask=attended(mask="numbers"),
    groups=attended_by_groups,
    width_80=attended(width=80),
    width_65=attended(width=65),
    width_160=attended(width=160),
    wide_with_a_mask=attended(width=160, mask="numbers", length=500),
    wider_with_a_mask=attended(width=256, mask="numbers"),
    width_256=attended(width=256),
    one_token=attended(length=1, keys=100),
    queries_keys_and_values_at_once=attended_at_once,
    multihead=multihead,
    multihead_without_weights=lambda make: multihead(make, need_weights=False),
)
for name, reentrant in {"checkpointed": False, "checkpointed, reentrant": True}.items():
    CASES[name] = lambda make, reentrant=reentrant: torch.utils.checkpoint.checkpoint(
        lambda tensor: tensor.relu().exp(), make(*ROWS), use_reentrant=reentrant
    )

# --- sizes around which kernels change ---

LONG_ROWS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))


def normed_rows(rows):
    return lambda make: F.layer_norm(make(rows, 64), (64,), make(64), make(64))


def embedded(count):
    return lambda make: F.embedding(make.indices(count), make.weight(500, 64))


def decoded(batch, length, keys):
    def case(make):
        query, key, value = (
            make(batch, 4, length, 64),
            make(batch, 4, keys, 64),
            make(batch, 4, keys, 64),
        )
        return F.scaled_dot_product_attention(query, key, value)

    return case


for most_rows, long in LONG_ROWS:
    for rows in (most_rows, most_rows + 1):
        for length in (long - 1, long):
            CASES[f"topk of {rows} x {length}"] = lambda make, shape=(rows, length): make(
                *shape, grad=False
            ).topk(3)
for rows in (1, 2, 127, 128):
    for length in (4096, 4097):
        CASES[f"sort of {rows} x {length}"] = lambda make, shape=(rows, length): make(
            *shape, grad=False
        ).sort(-1)
for count in (3072, 3073):
    CASES[f"embedding of {count}"] = embedded(count)
for rows in (65_536, 65_537):
    CASES[f"layer norm of {rows} rows"] = normed_rows(rows)
for count in (2304, 2305):
    CASES[f"permutation of {count}"] = lambda make, count=count: torch.randperm(
        count, device="cuda"
    )
for rows in (1792, 1793, 30_000):
    CASES[f"batch norm of {rows} rows"] = lambda make, rows=rows: batch_norm(make, rows, 96)
for shape in ((1, 1, 512), (2, 1, 512), (4, 1000, 8000), (1, 4096, 4096)):
    CASES[f"attention of {shape}"] = decoded(*shape)

# --- optimizers ---


def parameters(make):
    return [nn.Parameter(make(*shape, grad=False)) for shape in ((300, 200), (300,), (20, 3, 3, 3))]


def optimized(make_optimizer):
    @building
    def build(make):
        weights = parameters(make)
        optimizer = make_optimizer(weights)

        def step(_):
            for _ in range(2):
                for weight in weights:
                    weight.grad = torch.zeros_like(weight)
                optimizer.step()
                optimizer.zero_grad()

        return step

    return build


@building
def clipped(make):
    weights = parameters(make)

    def step(_):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        nn.utils.clip_grad_norm_(weights, 1.0)
        nn.utils.clip_grad_value_(weights, 1.0)

    return step


OPTIMIZERS = "SGD Adam AdamW Adagrad Adadelta RMSprop NAdam RAdam Adamax Rprop ASGD Adafactor"
for name in OPTIMIZERS.split():
    if hasattr(torch.optim, name):
        make_optimizer = getattr(torch.optim, name)
        CASES[name] = optimized(partial(make_optimizer, lr=0.1))
        CASES[f"{name}, one by one"] = optimized(partial(make_optimizer, lr=0.1, foreach=False))
for name in ("SGD", "Adam", "AdamW", "Adagrad"):
    CASES[f"{name}, fused"] = optimized(partial(getattr(torch.optim, name), lr=0.1, fused=True))
add(
    momentum=optimized(
        lambda weights: torch.optim.SGD(weights, 0.1, 0.9, weight_decay=0.1, nesterov=True)
    ),
    capturable=optimized(lambda weights: torch.optim.Adam(weights, capturable=True)),
    amsgrad=optimized(lambda weights: torch.optim.Adam(weights, amsgrad=True)),
    centered=optimized(lambda weights: torch.optim.RMSprop(weights, centered=True, momentum=0.9)),
    clipped=clipped,
)


# --- backward passes of gradients ---


def critic(make):
    """Return scores, in three layers, and what they are of, of a thread that has made more nodes than its backward passes."""
    x = make(64, 384)
    for _ in range(200):
        x.view(64, 384)
    hidden = F.leaky_relu(x @ make.weight(384, 512), 0.2)
    return F.leaky_relu(hidden @ make.weight(512, 256), 0.2) @ make.weight(256, 1), x


def gradient_penalty(make):
    scores, x = critic(make)
    [gradient] = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.mean() + 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()


def curvature(make):
    """As AdaHessian: the gradient of a gradient that is in ``.grad``."""
    scores, x = critic(make)
    scores.square().sum().backward(create_graph=True, inputs=[x])
    gradient, x.grad = x.grad, None
    return gradient


def penalty_of_a_residual(make):
    """Its gradients are added with a graph, and the layer norm's second backward pass makes a number on the card."""
    x = make(64, 384)
    out = x.exp() + F.layer_norm(x, (384,), make(384), make(384)) @ make.weight(384, 384)
    [gradient] = torch.autograd.grad(out.sum(), x, create_graph=True)
    return gradient.square().mean()


@building
def penalty_with_saved_tensors_on_the_host(make):
    """Parameters too are copied to the host as they are saved, and back where a node reads them, once in each backward pass."""
    layers = nn.Sequential(nn.LayerNorm(384), nn.Linear(384, 512), nn.GELU()).to("cuda", make.dtype)

    def step(make):
        x = make(64, 384)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            out = layers(x)
        [gradient] = torch.autograd.grad(out.sum(), x, create_graph=True)
        return gradient.square().mean()

    return step


add(
    gradient_penalty=gradient_penalty,
    curvature=curvature,
    penalty_of_a_residual=penalty_of_a_residual,
    penalty_with_saved_tensors_on_the_host=penalty_with_saved_tensors_on_the_host,
)

# By variant and case: requests of 100,000 bytes or more, as stated by hand: operands, what forward keeps, results, gradients.
# The workspaces of two threads are cuBLAS's; softmax multiplies its gradient by its result first.
ELEMENTS, PIXELS, WORKSPACE = 2_400_000, 6_422_528, 8_519_680  # bytes in float32
IN_16_BITS = [160_000, WORKSPACE, 160_000]
STATED = {
    "fp32": {
        **dict.fromkeys(["relu", "gelu", "clone", "cross_entropy"], [ELEMENTS] * 4),
        **dict.fromkeys(
            ["dropout_of_channels", "batch_norm", "group_norm", "permute"], [PIXELS] * 4
        ),
        "dropout": [ELEMENTS, ELEMENTS // 4, *[ELEMENTS] * 3],
        "dropout_in_evaluation": [ELEMENTS] * 4,
        "masked_fill": [ELEMENTS, ELEMENTS, ELEMENTS // 4, *[ELEMENTS] * 3],
        "half": [ELEMENTS, ELEMENTS // 2, ELEMENTS // 2, ELEMENTS],
        "layer_norm": [6_144_000] * 4,
        "softmax": [16_000_000] * 5,
        "log_softmax": [16_000_000] * 4,
        "mse_loss, mean": [ELEMENTS] * 5,
        "linear": [240_000, 480_000, 320_000, WORKSPACE, 320_000, 240_000, WORKSPACE, 480_000],
        "conv2d": [PIXELS // 2, PIXELS, PIXELS, PIXELS // 2],
        "max_pool2d": [PIXELS, PIXELS // 4, PIXELS // 2, PIXELS // 4, PIXELS],
        "embedding": [2_000_000, 800_000, 800_000, 2_000_000],
        "cat": [ELEMENTS, ELEMENTS, *[2 * ELEMENTS] * 2, ELEMENTS, ELEMENTS],
        "split": [ELEMENTS, *[ELEMENTS // 3] * 3, ELEMENTS],
        "sum_of_columns": [81_920_000, 113_246_208, 81_920_000],
        **dict.fromkeys(["checkpointed", "checkpointed, reentrant"], [ELEMENTS] * 8),
        "attention: plain": [*[1_638_400] * 10, 2_099_200, *[1_638_400] * 3],
        "Adam": [240_000] * 6,  # two steps: gradients, moments at the first, denominators
    },
    "fp32 gaps": {
        "batch_norm": [PIXELS] * 8
    },  # cuDNN's are contiguous: copies of x and of its gradient, and back
    "fp16": {
        "softmax_in_float32": [8_000_000, 16_000_000, 16_000_000, 8_000_000, 16_000_000],
        "attention: plain": [*[819_200] * 10, 2_097_152],
    },
    "amp bf16": {
        "linear": [
            240_000,
            480_000,
            240_000,
            120_000,
            *IN_16_BITS,
            120_000,
            WORKSPACE,
            240_000,
            240_000,
            480_000,
        ]
    },
}
# The dtype under autocast: the low one even of float32, float32 even of the low one, or that of the operands.
AUTOCAST = {
    "low": (
        "linear", "matmul", "bmm", "baddbmm", "mv", "conv1d_depthwise", "conv2d_same", "einsum_of_heads", "prelu_of_one",
    ),
    "float32": (
        "softmax", "log_softmax", "sum", "layer_norm", "exp", "power", "cross_entropy", "mse_loss, mean", "cumsum of rows",
        "vector_norm", "group_norm", "rsqrt", "softplus", "logits", "cosine_similarity", "nearest_of_sequences",
        "prod of rows", "smooth_l1_loss, mean",
    ),
    "unchanged": (
        "gelu", "relu", "mean", "add", "cat", "stack", "avg_pool1d", "silu", "avg_pool3d", "batch_norm",
        "pad_sequences_by_reflection",
    ),
}  # fmt: skip

# By case: variants that differ, and why.
LAYOUT = (
    ("bf16 gaps",),
    "a product with an expanded number of bfloat16: fakes lose the gaps of the other factor",
)
WIDENED = (
    ("bf16 gaps",),
    "torch's own kernel, which takes bfloat16, copies what has gaps to float32",
)
LAST = ("fp32 last", "bf16 last"), "channels last is made contiguous in several tensors"
EXCEPTIONS = {
    **dict.fromkeys(
        ["nansum", "l1_loss, sum", "cross_entropy_of_shares", "cosine_similarity"], LAYOUT
    ),
    **dict.fromkeys(
        [name for name in CASES if name.startswith(("batch_norm", "batch norm"))], WIDENED
    ),
    "batch_norm_evaluated": (
        ("bf16 gaps", "fp32 last", "bf16 last"),
        "torch's own backward pass follows one of cuDNN forward",
    ),
    "attention of (1, 1, 512)": (
        ("fp32 last", "bf16 last"),
        "one token is contiguous in any format",
    ),
    "adaptive_max_pool2d": LAST,
    "bilinear_antialiased": LAST,
    "instance_norm": (
        ("fp32 gaps", "bf16 gaps", "amp fp16 gaps"),
        "keeps a contiguous copy of which fakes make a view",
    ),
    "number_to_a_power": (
        ("fp32 gaps", "bf16 gaps", "amp fp16 gaps"),
        "fakes lose the gaps of the exponent",
    ),
    "ASGD": (tuple(VARIANTS), "its numbers are freed in another order"),
    "elements_by_32_bits": (tuple(VARIANTS), "torch keeps the widened indices until it sorts"),
    "attention: groups": (
        ("fp32", "fp32 gaps", "fp32 last", "fp32 sum", "bf16 gaps", "bf16 last", "amp fp16 gaps"),
        "efficient attention takes groups itself",
    ),
}

# Compared on each version of torch, by the sizes of their requests: the version since which they are those of 2.14.
EVERY_VERSION = {
    "fp32 sum": dict.fromkeys(
        ["rms_norm", "conv2d", "conv2d_to_tokens", "softmax", "layer_norm_of_permuted_images", "many_rows",
         "elements_by_32_bits", "attention: plain", "attention: dropout"],
        (2, 6),
    ) | {"embedding_of_many": (2, 14)},
    "fp32 last": dict.fromkeys(
        ["conv2d", "softmax_of_channels", "log_softmax_of_channels", "roll", "cumsum_of_channels", "pixel_shuffle",
         "layer_norm_of_images"],
        (2, 6),
    ) | {"topk_of_channels": (2, 12)},
    "fp16 sum": {
        "batch_norm": (2, 6), "batch_norm_with_weights_of_its_dtype": (2, 6), "layer_norm": (2, 6), "rms_norm": (2, 6),
        "attention: mask": (2, 6), "attention: plain": (2, 9), "attention: width_80": (2, 9),
    },
}  # fmt: skip
