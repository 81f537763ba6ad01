// The largest entries of every layer of a table, chosen exactly and packed in order, without a word to the host.
//
// A layer's threshold is found digit by digit: magnitudes are ordered as the integers that their bits are. `topk.ptx` is made
// of this file by `python bench/gpu/compile.py`; the driver compiles that for the GPU at hand.

typedef unsigned int u32;

const u32 THREADS = 256;
const u32 BINS = 2048;
const u32 INFINITE = 0x7f800000u;

// A part of a layer that one block looks at.
struct Tile { u32 layer, start, count, unused; };
// Where a layer's tiles begin, how many there are, where its entries are packed, and how many these are.
struct Layer { u32 tile, tiles, base, entries; };
// The first bits of a layer's threshold, and how many entries are still to be found among those that begin with them.
struct Choice { u32 prefix, left; };
struct Counts { u32 above, equal; };

__device__ u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

extern "C" __global__ void topk_reset(const Layer* layers, Choice* choices, u32 count, u32* bad) {
    u32 layer = blockIdx.x * THREADS + threadIdx.x;
    if (layer < count) choices[layer] = Choice{0, layers[layer].entries};
    if (layer == 0) *bad = 0;
}

// Counts the digits at `shift` of those whose higher bits are known. The first time it adds what was not sent yet.
extern "C" __global__ void topk_count_digits(float* values, const float* residual, const Tile* tiles, const Choice* choices,
                                             u32* bins, u32* bad, u32 shift, u32 mask, u32 known) {
    __shared__ u32 own[BINS];
    for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) own[bin] = 0;
    __syncthreads();
    Tile tile = tiles[blockIdx.x];
    u32 prefix = choices[tile.layer].prefix;
    for (u32 index = threadIdx.x; index < tile.count; index += THREADS) {
        u32 at = tile.start + index;
        float value = values[at];
        if (residual) {
            value += residual[at];
            values[at] = value;
        }
        u32 key = magnitude(value);
        if (residual && key >= INFINITE) *bad = 1;
        if ((key >> known) == prefix) atomicAdd(&own[(key >> shift) & mask], 1u);
    }
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS)
        if (own[bin]) atomicAdd(&bins[tile.layer * BINS + bin], own[bin]);
}

// Appends the digit of the last entry that is wanted to a layer's prefix, and clears the bins.
extern "C" __global__ void topk_pick_digit(u32* bins, Choice* choices, u32 bits) {
    __shared__ u32 sums[THREADS];
    const u32 each = BINS / THREADS;
    u32* own = bins + blockIdx.x * BINS;
    u32 sum = 0;
    for (u32 bin = 0; bin < each; ++bin) sum += own[threadIdx.x * each + bin];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        Choice choice = choices[blockIdx.x];
        int group = THREADS - 1;
        while (group > 0 && sums[group] < choice.left) choice.left -= sums[group--];
        int bin = group * each + each - 1;
        while (bin > group * (int)each && own[bin] < choice.left) choice.left -= own[bin--];
        choice.prefix = (choice.prefix << bits) | (u32)bin;
        choices[blockIdx.x] = choice;
    }
    __syncthreads();
    for (u32 bin = 0; bin < each; ++bin) own[threadIdx.x * each + bin] = 0;
}

// How many entries of a tile are above its layer's threshold, and how many are equal to it.
extern "C" __global__ void topk_count_entries(const float* values, const Tile* tiles, const Choice* choices, Counts* counts) {
    __shared__ u32 above, equal;
    if (threadIdx.x == 0) above = equal = 0;
    __syncthreads();
    Tile tile = tiles[blockIdx.x];
    u32 threshold = choices[tile.layer].prefix, own_above = 0, own_equal = 0;
    for (u32 index = threadIdx.x; index < tile.count; index += THREADS) {
        u32 key = magnitude(values[tile.start + index]);
        own_above += key > threshold;
        own_equal += key == threshold;
    }
    for (u32 lanes = 16; lanes; lanes >>= 1) {
        own_above += __shfl_down_sync(0xffffffffu, own_above, lanes);
        own_equal += __shfl_down_sync(0xffffffffu, own_equal, lanes);
    }
    if ((threadIdx.x & 31) == 0) {
        atomicAdd(&above, own_above);
        atomicAdd(&equal, own_equal);
    }
    __syncthreads();
    if (threadIdx.x == 0) counts[blockIdx.x] = Counts{above, equal};
}

// What comes before a thread in its block; `total` is of all. Two sums in one number, of 16 bits each.
__device__ u32 sum_before(u32 own, u32& total) {
    __shared__ u32 warps[THREADS / 32];
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, sum = own;
    for (u32 lanes = 1; lanes < 32; lanes <<= 1) {
        u32 other = __shfl_up_sync(0xffffffffu, sum, lanes);
        if (lane >= lanes) sum += other;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    u32 before = 0;
    total = 0;
    for (u32 index = 0; index < THREADS / 32; ++index) {
        if (index < warp) before += warps[index];
        total += warps[index];
    }
    return before + sum - own;
}

// Turns counts of tiles into where a tile's entries are packed, and how many of its layer's equal ones come before it.
extern "C" __global__ void topk_place_tiles(const Layer* layers, const Choice* choices, Counts* counts) {
    Layer layer = layers[blockIdx.x];
    u32 left = choices[blockIdx.x].left, above = 0, equal = 0;
    for (u32 first = 0; first < layer.tiles; first += THREADS) {
        u32 index = first + threadIdx.x;
        Counts own = index < layer.tiles ? counts[layer.tile + index] : Counts{0, 0};
        u32 all_above, all_equal;
        u32 above_before = above + sum_before(own.above, all_above);
        u32 equal_before = equal + sum_before(own.equal, all_equal);
        if (index < layer.tiles)
            counts[layer.tile + index] = Counts{layer.base + above_before + min(equal_before, left), equal_before};
        above += all_above;
        equal += all_equal;
    }
}

// What is sent of a value: rounded to halves of kind 1 (f16) or 2 (bf16), which have a largest number.
__device__ float rounded(float value, u32 half) {
    if (half == 0 || magnitude(value) >= INFINITE) return value;
    if (half == 1) {
        value = fminf(fmaxf(value, -65504.0f), 65504.0f);
        float result;
        asm("{ .reg .b16 half; cvt.rn.f16.f32 half, %1; cvt.f32.f16 %0, half; }" : "=f"(result) : "f"(value));
        return result;
    }
    const float largest = __uint_as_float(0x7f7f0000u);
    u32 bits = __float_as_uint(fminf(fmaxf(value, -largest), largest));
    bits += 0x7fffu + ((bits >> 16) & 1u);
    return __uint_as_float(bits & 0xffff0000u);
}

// Packs what is chosen, in order, and keeps the rest. Where something is no number, what was kept before is kept.
extern "C" __global__ void topk_pack(const float* values, float* residual, const Tile* tiles, const Choice* choices,
                                     const Counts* counts, const u32* bad, int* places, float* packed, u32 half) {
    const u32 each = 4;
    Tile tile = tiles[blockIdx.x];
    Choice choice = choices[tile.layer];
    Counts before = counts[blockIdx.x];
    u32 target = before.above, equal = before.equal;
    bool keeps = *bad == 0;
    for (u32 strip = 0; strip < tile.count; strip += THREADS * each) {
        float own[each];
        u32 first = strip + threadIdx.x * each, above_and_equal = 0;
        for (u32 index = 0; index < each; ++index) {
            own[index] = first + index < tile.count ? values[tile.start + first + index] : 0.0f;
            u32 key = magnitude(own[index]);
            bool is_here = first + index < tile.count;
            above_and_equal += (is_here && key > choice.prefix ? 1u : 0u) + (is_here && key == choice.prefix ? 0x10000u : 0u);
        }
        u32 total, sums = sum_before(above_and_equal, total);
        u32 above = sums & 0xffffu, equals = equal + (sums >> 16);
        for (u32 index = 0; index < each && first + index < tile.count; ++index) {
            u32 at = tile.start + first + index, key = magnitude(own[index]);
            bool is_equal = key == choice.prefix, is_chosen = key > choice.prefix || (is_equal && equals < choice.left);
            float sent = 0.0f;
            if (is_chosen) {
                u32 to = target + above + min(equals, choice.left) - min(equal, choice.left);
                sent = rounded(own[index], half);
                places[to] = (int)at;
                packed[to] = sent;
            }
            above += key > choice.prefix;
            equals += is_equal;
            if (keeps) residual[at] = own[index] - sent;
        }
        target += (total & 0xffffu) + min(equal + (total >> 16), choice.left) - min(equal, choice.left);
        equal += total >> 16;
    }
}
