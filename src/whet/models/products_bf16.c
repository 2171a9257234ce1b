/* Matrix products of bfloat16 by the CPU's tile instructions (AMX): out[i][j] = sum over k of a[i][k] b[k][j].

   The law of this file: an element's bits depend on its row of a and its column of b alone. From what stands in `out`, or
   0, it is added to in groups of STEP terms, k ascending; a group's sum is that of its terms with even k and that of its
   terms with odd k, each one chain of fused multiply-adds from 0, added to one another. All is rounded to float32, to the
   nearest, and what is below the smallest normal number is 0: TDPBF16PS is specified so (Intel SDM, volume 2). Terms
   behind the last are zeros. Which operand is tiled by rows, packing, blocks and threads are free. */

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && !defined(WHET_NO_TILES)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SIDE 16 /* rows of a tile; columns of one of float32, and pairs of terms in one of bfloat16 */
#define STEP 32 /* part of the law: terms of one instruction */
#define PACKED_ROW 64 /* bytes of a row of a tile */
#define TILE_BYTES (SIDE * PACKED_ROW)
#define BLOCK 256 /* rows and columns of results whose sums stay in the second cache; a multiple of 2 SIDE */
#define DEEP 16 /* steps along k that a block's operands stay there for */
#define AHEAD 512 /* bytes along k that are fetched before they are used, where rows are read as they lie */

/* The element (i, k) is number i by_i + k by_k. */
typedef struct {
    const uint16_t *data;
    i64 by_i, by_k, I, K;
} Halves;

/* An operand as tiles: group g has rows g SIDE and on; its tile for step s starts at byte s by_step, its rows are by_row
   bytes apart. The last group may lie elsewhere. */
typedef struct {
    const char *data, *last;
    i64 by_group, by_step, by_row, groups;
} Tiles;

typedef struct {
    void *data;
    i64 by_i, by_j;
    int half, add;
} Out;

/* ---- packing ------------------------------------------------------------------------------------------------- */

INLINE void turn(__m512i r[SIDE]) {
    __m512i t[SIDE];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* One tile: pairs of terms by row (row i: k0, k0 + 1, ...), or `turned`, rows by pair. What lies outside is 0. */
INLINE void pack_tile(const Halves *m, i64 i0, i64 k0, char *to, const int turned) {
    i64 I = MIN(SIDE, m->I - i0), K = MIN(STEP, m->K - k0);
    const uint16_t *from = m->data + i0 * m->by_i + k0 * m->by_k;
    __m512i r[SIDE];
    int by_pair = 0;
    if (m->by_k == 1) {
        __mmask32 mask = K == STEP ? ~0u : (1u << K) - 1;
        UNROLL for (int i = 0; i < SIDE; i++)
            r[i] = i < I ? _mm512_maskz_loadu_epi16(mask, from + i * m->by_i) : _mm512_setzero_si512();
    } else if (m->by_i == 1) {
        __mmask16 mask = I == SIDE ? 0xffff : (1u << I) - 1;
        by_pair = 1;
        const __m512i order = _mm512_set_epi16(47,15,46,14,45,13,44,12,43,11,42,10,41,9,40,8,39,7,38,6,37,5,36,4,35,3,34,2,33,1,32,0);
        UNROLL for (int p = 0; p < SIDE; p++) {
            __m256i even = _mm256_setzero_si256(), odd = even;
            if (2 * p < K) even = _mm256_maskz_loadu_epi16(mask, from + 2 * p * m->by_k);
            if (2 * p + 1 < K) odd = _mm256_maskz_loadu_epi16(mask, from + (2 * p + 1) * m->by_k);
            r[p] = _mm512_permutex2var_epi16(_mm512_castsi256_si512(even), order, _mm512_castsi256_si512(odd));
        }
    } else {
        uint16_t rows[SIDE][STEP] __attribute__((aligned(64))) = {0};
        for (i64 i = 0; i < I; i++) for (i64 k = 0; k < K; k++) rows[i][k] = from[i * m->by_i + k * m->by_k];
        UNROLL for (int i = 0; i < SIDE; i++) r[i] = _mm512_load_si512(rows[i]);
    }
    if (by_pair != turned) turn(r);
    UNROLL for (int i = 0; i < SIDE; i++) _mm512_store_si512(to + 64 * i, r[i]);
}

INLINE i64 steps_of(i64 K) { return (K + STEP - 1) / STEP; }
INLINE i64 groups_of(i64 I) { return (I + SIDE - 1) / SIDE; }

/* Tiles g0 to g1 of the steps s0 to s1. Along what lies side by side first: each line of memory is read once. */
static void pack_tiles(const Halves *m, i64 g0, i64 g1, i64 s0, i64 s1, char *to, i64 size, int turned) {
    for (i64 s = s0; s < s1; s++)
        for (i64 g = g0; g < g1; g++) {
            char *tile = to + g * size + s * TILE_BYTES;
            if (turned) pack_tile(m, g * SIDE, s * STEP, tile, 1);
            else pack_tile(m, g * SIDE, s * STEP, tile, 0);
        }
}

/* The groups from g0 on, in `to`, of `size` bytes each. */
static void pack(const Halves *m, i64 g0, char *to, i64 size, int turned, int threads) {
    i64 groups = groups_of(m->I), steps = steps_of(m->K);
    to -= g0 * size;
    if (m->by_i == 1 && threads > 1) {
        _Pragma("omp parallel for schedule(static) num_threads(threads)")
        for (i64 s = 0; s < steps; s++) pack_tiles(m, g0, groups, s, s + 1, to, size, turned);
    } else if (threads > 1) {
        _Pragma("omp parallel for schedule(static) num_threads(threads)")
        for (i64 g = g0; g < groups; g++) pack_tiles(m, g, g + 1, 0, steps, to, size, turned);
    } else if (m->by_i == 1)
        pack_tiles(m, g0, groups, 0, steps, to, size, turned);
    else
        for (i64 g = g0; g < groups; g++) pack_tiles(m, g, g + 1, 0, steps, to, size, turned);
}

/* ---- tiles --------------------------------------------------------------------------------------------------- */

/* Eight whole tiles. A constant: gcc takes the instruction to read 8 bytes of it, and need store no more of a variable. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} whole __attribute__((aligned(64))) = {1, .bytes = {[0 ... 7] = PACKED_ROW}, .rows = {[0 ... 7] = SIDE}};

static void configure(void) { _tile_loadconfig(&whole); }

/* What is stored before is in memory after: to gcc, the loads of a tile read none. */
INLINE void stored(void) { __asm__ volatile("" ::: "memory"); }

/* A group as its tiles lie. */
typedef struct {
    const char *data;
    i64 by_row, by_step;
} Group;

INLINE Group group(const Tiles *t, i64 g, i64 step) {
    int last = g == t->groups - 1;
    Group found = {last ? t->last : t->data + g * t->by_group, last ? PACKED_ROW : t->by_row, last ? TILE_BYTES : t->by_step};
    found.data += step * found.by_step;
    return found;
}

/* M x N tiles of sums, from `c` or, where `first`, from 0, plus `steps` steps. */
INLINE void tiles(Group l0, Group l1, Group r0, Group r1, i64 steps, float *c, i64 ld, int first, const int M, const int N) {
    i64 row = ld * sizeof(float);
    float *beside = c + SIDE, *below = c + SIDE * ld;
    stored();
    if (first) {
        _tile_zero(0);
        if (N > 1) _tile_zero(1);
        if (M > 1) _tile_zero(2);
        if (M > 1 && N > 1) _tile_zero(3);
    } else {
        _tile_loadd(0, c, row);
        if (N > 1) _tile_loadd(1, beside, row);
        if (M > 1) _tile_loadd(2, below, row);
        if (M > 1 && N > 1) _tile_loadd(3, below + SIDE, row);
    }
    for (i64 s = 0; s < steps; s++) {
        UNROLL for (int i = 0; i < SIDE; i++) { /* rows that lie far apart are streams too many for the processor */
            __builtin_prefetch(l0.data + i * l0.by_row + AHEAD);
            if (M > 1) __builtin_prefetch(l1.data + i * l0.by_row + AHEAD);
        }
        _tile_loadd(4, l0.data, l0.by_row);
        _tile_loadd(6, r0.data, PACKED_ROW);
        _tile_dpbf16ps(0, 4, 6);
        if (N > 1) {
            _tile_loadd(7, r1.data, PACKED_ROW);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (M > 1) {
            _tile_loadd(5, l1.data, l0.by_row);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
        l0.data += l0.by_step, l1.data += l0.by_step, r0.data += TILE_BYTES, r1.data += TILE_BYTES;
    }
    _tile_stored(0, c, row);
    if (N > 1) _tile_stored(1, beside, row);
    if (M > 1) _tile_stored(2, below, row);
    if (M > 1 && N > 1) _tile_stored(3, below + SIDE, row);
}

/* L groups of the left from l0 on times R of the right from r0 on, in c [16 L][ld]; from 0 where `zero`. */
static void multiply_groups(const Tiles *l, i64 l0, i64 L, const Tiles *r, i64 r0, i64 R, i64 steps, float *c, i64 ld,
                            int zero) {
    for (i64 s = 0; s < steps; s += DEEP)
        for (i64 j = 0; j < R; j += 2)
            for (i64 i = 0; i < L;) {
                int beside = j + 1 < R, first = zero && !s;
                Group left = group(l, l0 + i, s), below = left, right = group(r, r0 + j, s), next = right;
                if (i + 1 < L) below = group(l, l0 + i + 1, s);
                if (beside) next = group(r, r0 + j + 1, s);
                /* the last group may lie otherwise */
                int pair = i + 1 < L && below.by_row == left.by_row && below.by_step == left.by_step;
                float *sums = c + i * SIDE * ld + j * SIDE;
                i64 some = MIN(DEEP, steps - s);
                if (pair && beside) tiles(left, below, right, next, some, sums, ld, first, 2, 2);
                else if (pair) tiles(left, below, right, right, some, sums, ld, first, 2, 1);
                else if (beside) tiles(left, left, right, next, some, sums, ld, first, 1, 2);
                else tiles(left, left, right, right, some, sums, ld, first, 1, 1);
                i += 1 + pair;
            }
}

/* ---- results ------------------------------------------------------------------------------------------------- */

/* To bfloat16, to the nearest, halves to even, as torch rounds; every NaN is one. */
INLINE __m256i rounded(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc0)));
}

/* n numbers that lie side by side. */
INLINE void write_row(const Out *out, i64 at, __m512 x, i64 n) {
    __mmask16 mask = n >= SIDE ? 0xffff : (1u << n) - 1;
    if (out->half) _mm256_mask_storeu_epi16((uint16_t *)out->data + at, mask, rounded(x));
    else _mm512_mask_storeu_ps((float *)out->data + at, mask, x);
}

static void write_one(const Out *out, i64 at, float x) {
    if (out->half) ((uint16_t *)out->data)[at] = _mm256_cvtsi256_si32(rounded(_mm512_set1_ps(x)));
    else ((float *)out->data)[at] = x;
}

static void put(const float *c, i64 ld, const Out *out, i64 i0, i64 I, i64 j0, i64 J) {
    i64 at = i0 * out->by_i + j0 * out->by_j;
    if (out->by_j == 1)
        for (i64 i = 0; i < I; i++) for (i64 j = 0; j < J; j += SIDE)
            write_row(out, at + i * out->by_i + j, _mm512_load_ps(c + i * ld + j), J - j);
    else if (out->by_i == 1)
        for (i64 i = 0; i < I; i += SIDE) for (i64 j = 0; j < J; j += SIDE) {
            __m512i r[SIDE];
            UNROLL for (int l = 0; l < SIDE; l++) r[l] = _mm512_load_si512(c + (i + l) * ld + j);
            turn(r);
            UNROLL for (int l = 0; l < SIDE; l++)
                if (j + l < J) write_row(out, at + i + (j + l) * out->by_j, _mm512_castsi512_ps(r[l]), I - i);
        }
    else
        for (i64 i = 0; i < I; i++) for (i64 j = 0; j < J; j++)
            write_one(out, at + i * out->by_i + j * out->by_j, c[i * ld + j]);
}

static void take(float *c, i64 ld, const Out *out, i64 i0, i64 I, i64 j0, i64 J) {
    const float *from = (const float *)out->data + i0 * out->by_i + j0 * out->by_j;
    for (i64 i = 0; i < I; i++) for (i64 j = 0; j < J; j++) c[i * ld + j] = from[i * out->by_i + j * out->by_j];
}

/* ---- the whole ----------------------------------------------------------------------------------------------- */

typedef struct {
    Tiles l, r;
    Out out;
    i64 I, J, steps;
} Work;

static void multiply_block(const Work *w, i64 i0, i64 j0) {
    float c[BLOCK * (BLOCK + SIDE)] __attribute__((aligned(64)));
    i64 I = MIN(BLOCK, w->I - i0), J = MIN(BLOCK, w->J - j0), ld = MIN(BLOCK, groups_of(w->J) * SIDE) + SIDE;
    if (w->out.add) take(c, ld, &w->out, i0, I, j0, J);
    else if (!w->steps) memset(c, 0, sizeof c);
    multiply_groups(&w->l, i0 / SIDE, groups_of(I), &w->r, j0 / SIDE, groups_of(J), w->steps, c, ld, !w->out.add);
    put(c, ld, &w->out, i0, I, j0, J);
}

/* The groups of `m` from g0 on, packed; before it they are read as they lie. Returns 0, or 1 where memory ran out. */
static int as_tiles(const Halves *m, i64 g0, int turned, Tiles *t, char **made, int threads) {
    i64 size = steps_of(m->K) * TILE_BYTES, groups = groups_of(m->I);
    if (!(*made = scratch_bytes((groups - g0) * size))) return 1;
    pack(m, g0, *made, size, turned, threads);
    *t = (Tiles){*made, *made + (groups - 1 - g0) * size, size, TILE_BYTES, PACKED_ROW, groups};
    if (g0) t->data = (const char *)m->data, t->by_group = 2 * SIDE * m->by_i, t->by_step = 2 * STEP, t->by_row = 2 * m->by_i;
    return 0;
}

static void multiply_blocks(const Work *w, int threads) {
    i64 down = (w->I + BLOCK - 1) / BLOCK, across = (w->J + BLOCK - 1) / BLOCK;
    if (threads > 1) {
        _Pragma("omp parallel num_threads(threads)")
        {
            configure();
            _Pragma("omp for schedule(dynamic)")
            for (i64 b = 0; b < down * across; b++) multiply_block(w, b / across * BLOCK, b % across * BLOCK);
            _tile_release();
        }
        return;
    }
    configure();
    for (i64 b = 0; b < down * across; b++) multiply_block(w, b / across * BLOCK, b % across * BLOCK);
    _tile_release();
}

/* Whether whole groups can be tiles as they lie. */
INLINE int lies_as_tiles(const Halves *m) { return m->by_k == 1 && m->K % STEP == 0; }

/* `l` by rows of tiles, `r` along their columns; out's i are l's rows. */
static int multiply(const Halves *l, const Halves *r, Out out, int threads) {
    char *made[2] = {0, 0};
    Work w = {.out = out, .I = l->I, .J = r->I, .steps = steps_of(l->K)};
    i64 g0 = lies_as_tiles(l) ? groups_of(l->I) - 1 : 0;
    int failed = as_tiles(l, g0, 0, &w.l, &made[0], threads) || as_tiles(r, 0, 1, &w.r, &made[1], threads);
    if (!failed) multiply_blocks(&w, threads);
    free(made[0]);
    free(made[1]);
    return failed;
}

/* out (+)= a b for [I, K] and [K, J] of bfloat16, of any strides; out: float32, or bfloat16 where `half` and not `add`.
   Returns 0, or 1 where memory ran out. An operand that lies as tiles is the left one, so that it is not copied; where
   both do, the larger one, as rows of a decode step are few; where none does, the smaller one, for it is turned. */
int whet_product_bf16(const void *a, i64 a_i, i64 a_k, const void *b, i64 b_k, i64 b_j, void *out, i64 out_i, i64 out_j,
                      i64 I, i64 J, i64 K, int half, int add, int threads) {
    if (!I || !J) return 0;
    if (2.0 * I * J * K < 1 << 22) threads = 1;
    Halves x = {a, a_i, a_k, I, K}, y = {b, b_j, b_k, J, K};
    int lies = lies_as_tiles(&x), swap = lies == lies_as_tiles(&y) ? (lies ? I < J : J < I) : !lies;
    return swap ? multiply(&y, &x, (Out){out, out_j, out_i, half, add}, threads)
                : multiply(&x, &y, (Out){out, out_i, out_j, half, add}, threads);
}

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* Whether this process may use tiles: the kernel asks to be asked. */
int whet_tiles(void) { return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); }
#else
int whet_tiles(void) { return 0; }
int whet_product_bf16(const void *a, i64 a_i, i64 a_k, const void *b, i64 b_k, i64 b_j, void *out, i64 out_i, i64 out_j,
                      i64 I, i64 J, i64 K, int half, int add, int threads) { return 1; }
#endif
