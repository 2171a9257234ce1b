/* Matrix products of whet: out[i][j] = sum over k of a[i][k] b[k][j], fp32.

   The law of this file: an element's bits depend on its row of a and its column of b alone. It is the sum, in order, of
   the sums over TERMS terms each; each of these is one chain of fused multiply-adds from 0, k ascending. Vectors, tiles,
   packing, threads, and which of the two operands lies along the lanes are free: none of them changes the chain. So rows
   agree however many there are, and processors of any vector width agree with one another.

   Two operands of bfloat16, which is the upper half of a float32, have the law of products_bf16.c, by fused
   multiply-adds: numbers are widened where they are packed, and what is below the smallest normal number is 0. So
   processors with tiles and those without agree. */

#include "vectors.h"

#define TERMS 256 /* part of the law: changing it changes bits */
#define STEP 32 /* part of the law of bfloat16, and of TERMS */

#if W == 16
#define ROWS 12 /* with 2 vectors: 24 accumulators of 32 registers */
#define ROWS_1 12 /* with 1 vector */
#define HALF_ROWS_1 12 /* with 1 vector and two chains */
#else
#define ROWS 6 /* 12 of 16 registers */
#define ROWS_1 12
#define HALF_ROWS_1 6
#endif
#define HALF_ROWS (ROWS / 2) /* with 2 vectors and two chains */
#define VECTORS 2
#define LANES (VECTORS * W)
#define STRIP 48 /* rows of a block that stays in the second cache beside a panel; a multiple of ROWS. Measured: more are slower */
#define WIDE 512 /* columns packed at a time: measured, more let the sums leave the cache, fewer read the rows too often */
#define DEEP (2 << 20) /* bytes of panels for several chains of the same columns: a strip's sums stay in the cache meanwhile */
#define AHEAD 8 /* numbers along k that are fetched before they are used: a panel of TERMS fills the first cache alone */
#define FEW 4 /* rows for which columns are turned in registers. Measured: from 5 on a lane each is as fast */
#define MANY_PANELS 8 /* panels that use a strip before it is worth packing */

/* A matrix of float32 or of bfloat16: the element (i, k) is number i by_i + k by_k. */
typedef struct {
    const void *data;
    i64 by_i, by_k;
    int half;
} Matrix;

/* p: [I, K], broadcast; q: [J, K], along the lanes; both of one dtype. */
typedef struct {
    Matrix p, q;
    float *out;
    i64 out_i, out_j;
    i64 I, J, K;
    int half;
} Product;

/* ---- bfloat16 ------------------------------------------------------------------------------------------------ */

INLINE float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* n numbers that lie one after the other, from number `at` on, as float32. */
INLINE void read_dense(const Matrix *m, i64 at, i64 n, float *to) {
    if (!m->half) {
        memcpy(to, (const float *)m->data + at, sizeof(float) * n);
        return;
    }
    const uint16_t *from = (const uint16_t *)m->data + at;
    for (i64 i = 0; i < n; i++) to[i] = widened(from[i]);
}

INLINE float number(const Matrix *m, i64 at) {
    return m->half ? widened(((const uint16_t *)m->data)[at]) : ((const float *)m->data)[at];
}

INLINE float read_one(const Matrix *m, i64 i, i64 k) { return number(m, i * m->by_i + k * m->by_k); }

/* How this thread rounds from here on: for bfloat16, what is below the smallest normal number is 0. Arithmetic between the
   two stands in functions that are not inlined: to a compiler, these change nothing of it. Returns what was before. */
INLINE unsigned rounding(int half) {
#if defined(__SSE__)
    unsigned before = _mm_getcsr();
    if (half) _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}

INLINE void round_as(unsigned before) {
#if defined(__SSE__)
    _mm_setcsr(before);
#endif
}

/* ---- one tile ------------------------------------------------------------------------------------------------ */

/* sums[r][v] of R rows and V vectors of lanes, from packed q [K][V][W]. `panel`: what is read next of q is fetched;
   `next`: so are the R rows behind these, which lie dense along k. Each costs up to 5 % where the numbers are near. */
INLINE void tile(const float *p, i64 p_i, i64 p_k, const float *q, i64 K, float *sums, const int R, const int V,
                 const int panel, const int next) {
    vf sum[MAX(ROWS_1, ROWS * VECTORS)], b[VECTORS];
    UNROLL for (int i = 0; i < R * V; i++) sum[i] = all(0);
    for (i64 k = 0; k < K; k++) {
        if (panel) UNROLL for (int v = 0; v < V; v++) __builtin_prefetch(q + ((k + AHEAD) * V + v) * W);
        if (next && (k & 15) < R) __builtin_prefetch(p + (R + (k & 15)) * p_i + (k & ~15));
        UNROLL for (int v = 0; v < V; v++) b[v] = load(q + (k * V + v) * W);
        UNROLL for (int r = 0; r < R; r++) {
            vf a = all(p[r * p_i + k * p_k]);
            UNROLL for (int v = 0; v < V; v++) sum[r * V + v] = fma_v(a, b[v], sum[r * V + v]);
        }
    }
    UNROLL for (int i = 0; i < R * V; i++) store(sums + i * W, sum[i]);
}

/* As `tile`, by the law of bfloat16: what stands in `sums` is added to in groups of STEP terms, even and odd ones apart. */
INLINE void tile_of_halves(const float *p, i64 p_i, i64 p_k, const float *q, i64 K, float *sums, const int R, const int V) {
    for (i64 k0 = 0; k0 < K; k0 += STEP) {
        vf even[MAX(HALF_ROWS_1, HALF_ROWS * VECTORS)], odd[MAX(HALF_ROWS_1, HALF_ROWS * VECTORS)], b[VECTORS];
        UNROLL for (int i = 0; i < R * V; i++) even[i] = odd[i] = all(0);
        i64 end = MIN(K, k0 + STEP), k = k0;
        for (; k + 2 <= end; k += 2)
            UNROLL for (int h = 0; h < 2; h++) {
                UNROLL for (int v = 0; v < V; v++) b[v] = load(q + ((k + h) * V + v) * W);
                UNROLL for (int r = 0; r < R; r++) {
                    vf a = all(p[r * p_i + (k + h) * p_k]);
                    UNROLL for (int v = 0; v < V; v++) {
                        vf *sum = (h ? odd : even) + r * V + v;
                        *sum = fma_v(a, b[v], *sum);
                    }
                }
            }
        if (k < end)
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
                even[r * V + v] = fma_v(all(p[r * p_i + k * p_k]), load(q + (k * V + v) * W), even[r * V + v]);
        UNROLL for (int i = 0; i < R * V; i++) store(sums + i * W, load(sums + i * W) + (even[i] + odd[i]));
    }
}

#define HALF_TILE(R, V) case R: tile_of_halves(p, p_i, p_k, q, K, sums, R, V); break;

static void half_tile_1(const float *p, i64 p_i, i64 p_k, const float *q, i64 K, float *sums, i64 rows) {
    switch (rows) {
        HALF_TILE(1, 1) HALF_TILE(2, 1) HALF_TILE(3, 1) HALF_TILE(4, 1) HALF_TILE(5, 1) HALF_TILE(6, 1)
#if HALF_ROWS_1 == 12
        HALF_TILE(7, 1) HALF_TILE(8, 1) HALF_TILE(9, 1) HALF_TILE(10, 1) HALF_TILE(11, 1) HALF_TILE(12, 1)
#endif
    }
}

static void half_tile_2(const float *p, i64 p_i, i64 p_k, const float *q, i64 K, float *sums, i64 rows) {
    switch (rows) {
        HALF_TILE(1, 2) HALF_TILE(2, 2) HALF_TILE(3, 2)
#if HALF_ROWS == 6
        HALF_TILE(4, 2) HALF_TILE(5, 2) HALF_TILE(6, 2)
#endif
    }
}

#define TILE(R, V) \
    case R: \
        if (far) tile(p, p_i, p_k, q, K, sums, R, V, 1, 1); \
        else tile(p, p_i, p_k, q, K, sums, R, V, 0, 0); \
        break;

/* A whole tile of rows that are packed: with strides known to the compiler. */
static void tile_packed(const float *p, const float *q, i64 K, float *sums) {
    tile(p, 1, ROWS, q, K, sums, ROWS, VECTORS, 1, 0);
}

/* `far`: these rows have not been read before, so they are in no cache. */
static void tile_1(const float *p, i64 p_i, i64 p_k, const float *q, i64 K, float *sums, i64 rows, int far) {
    switch (rows) {
        TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
        TILE(7, 1) TILE(8, 1) TILE(9, 1) TILE(10, 1) TILE(11, 1) TILE(12, 1)
    }
}

static void tile_2(const float *p, i64 p_i, i64 p_k, const float *q, i64 K, float *sums, i64 rows, int far) {
    switch (rows) {
        TILE(1, 2) TILE(2, 2) TILE(3, 2) TILE(4, 2) TILE(5, 2) TILE(6, 2)
#if ROWS == 12
        TILE(7, 2) TILE(8, 2) TILE(9, 2) TILE(10, 2) TILE(11, 2) TILE(12, 2)
#endif
    }
}

/* ---- packing ------------------------------------------------------------------------------------------------- */

#if defined(__AVX__)
/* Four numbers from number `at` on, of bfloat16 where `half`. */
INLINE __m128 read_4(const void *data, i64 at, const int half) {
    if (!half) return _mm_loadu_ps((const float *)data + at);
    __m128i halves = _mm_loadl_epi64((const __m128i *)((const uint16_t *)data + at));
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), halves));
}

/* Eight numbers, from number `at` on, of each of eight rows, the last of them read again where there are fewer; out[k]:
   number k of all. Halves of vectors are joined where they are read, so that nothing crosses the lanes of 128 bits. */
INLINE void transposed_8(const void *data, i64 at, i64 by_row, const i64 rows, __m256 out[8], const int half) {
    UNROLL for (int k = 0; k < 8; k += 4) {
        __m256 r[4], t[4];
        UNROLL for (int l = 0; l < 4; l++) {
            __m128 low = read_4(data, at + MIN(l, rows - 1) * by_row + k, half);
            __m128 high = read_4(data, at + MIN(l + 4, rows - 1) * by_row + k, half);
            r[l] = _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
        }
        UNROLL for (int l = 0; l < 2; l++) {
            t[l] = _mm256_unpacklo_ps(r[2 * l], r[2 * l + 1]);
            t[l + 2] = _mm256_unpackhi_ps(r[2 * l], r[2 * l + 1]);
        }
        UNROLL for (int l = 0; l < 2; l++) {
            out[k + 2 * l] = _mm256_shuffle_ps(t[2 * l], t[2 * l + 1], 0x44);
            out[k + 2 * l + 1] = _mm256_shuffle_ps(t[2 * l], t[2 * l + 1], 0xee);
        }
    }
}

/* Eight columns from number `at` on, each dense along k, into [K][8] of a panel whose rows are `lanes` apart. */
INLINE void transpose_8(const Matrix *q, i64 at, i64 K, float *to, i64 lanes, const int half) {
    i64 k = 0;
    for (; k + 8 <= K; k += 8) {
        __m256 turned[8];
        transposed_8(q->data, at + k, q->by_i, 8, turned, half);
        UNROLL for (int l = 0; l < 8; l++) _mm256_storeu_ps(to + (k + l) * lanes, turned[l]);
    }
    for (; k < K; k++) for (int l = 0; l < 8; l++) to[k * lanes + l] = number(q, at + l * q->by_i + k);
}

#define OVER (ROWS > 8 ? 16 - ROWS : 8 - ROWS) /* numbers that a store of whole vectors writes behind a group's end */

/* The first numbers of ROWS rows, each dense along k, into [k][ROWS]: returns how many. Each store writes behind the
   group of its k, and what comes next overwrites it. */
INLINE i64 pack_dense(const float *p, i64 p_i, i64 K, float *to) {
    i64 k = 0;
    for (; k + 8 <= K; k += 8) {
        __m256 low[8], high[8];
        transposed_8(p, k, p_i, MIN(ROWS, 8), low, 0);
        if (ROWS > 8) transposed_8(p, 8 * p_i + k, p_i, MAX(ROWS - 8, 1), high, 0);
        UNROLL for (int l = 0; l < 8; l++) {
            _mm256_storeu_ps(to + (k + l) * ROWS, low[l]);
            if (ROWS > 8) _mm256_storeu_ps(to + (k + l) * ROWS + 8, high[l]);
        }
    }
    return k;
}
#else
#define OVER 0
INLINE i64 pack_dense(const float *p, i64 p_i, i64 K, float *to) { return 0; }
#endif

/* Lanes of a panel of n columns: no wider than they need. */
INLINE i64 panel_lanes(i64 n) { return n <= W ? W : LANES; }

/* The panel from column `at` of the J columns from j0, into [K][lanes]; lanes without a column are 0. */
static void pack_panel(const Product *a, i64 k0, i64 K, i64 j0, i64 J, i64 at, float *panels) {
    i64 n = MIN(LANES, J - at), lanes = panel_lanes(n), j = 0;
    const Matrix *q = &a->q;
    i64 from = (j0 + at) * q->by_i + k0 * q->by_k;
    float *to = panels + at * K;
    if (q->by_i == 1) {
        for (i64 k = 0; k < K; k++) read_dense(q, from + k * q->by_k, n, to + k * lanes);
        j = n;
    }
#if defined(__AVX__)
    for (; q->by_k == 1 && j + 8 <= n; j += 8)
        if (q->half) transpose_8(q, from + j * q->by_i, K, to + j, lanes, 1);
        else transpose_8(q, from + j * q->by_i, K, to + j, lanes, 0);
#endif
    for (; j < n; j++) for (i64 k = 0; k < K; k++) to[k * lanes + j] = read_one(q, j0 + at + j, k0 + k);
    for (i64 k = 0; n < lanes && k < K; k++) memset(to + k * lanes + n, 0, sizeof(float) * (lanes - n));
}

/* Whole panels of columns that lie side by side: each line of memory is read once, k by k. Returns how many columns. */
static i64 pack_panels_beside(const Product *a, i64 k0, i64 K, i64 j0, i64 J, float *panels) {
    const Matrix *q = &a->q;
    if (q->by_i != 1 || q->half) return 0;
    const float *from = (const float *)q->data + j0 + k0 * q->by_k;
    J = J / LANES * LANES;
    for (i64 k = 0; k < K; k++, from += q->by_k)
        for (i64 j = 0; j < J; j += LANES)
            UNROLL for (int v = 0; v < VECTORS; v++)
                store(panels + j * K + k * LANES + v * W, load(from + j + v * W));
    return J;
}

/* Rows of p as they are read: number (i, k) at data[i by_i + k by_k]. */
typedef struct {
    const float *data;
    i64 by_i, by_k;
} Strip;

/* Whole groups of rows that lie side by side: each line of memory is read once, k by k, though they may be pages apart.
   All but the last k go by whole vectors; what they write behind their group comes next, and what they read behind their
   row is the next one's: so rows must not lie in one another. */
static void pack_beside(const float *p, i64 by_k, i64 I, i64 K, float *to) {
    for (i64 k = 0; k < K; k++, p += by_k, to += ROWS) {
        for (i64 i = 0; i < I; i += 16) __builtin_prefetch(p + AHEAD * by_k + i);
        if (W >= ROWS && by_k >= W && k < K - 1) for (i64 i = 0; i < I; i += ROWS) store(to + i * K, load(p + i));
        else for (i64 i = 0; i < I; i += ROWS) memcpy(to + i * K, p + i, sizeof(float) * ROWS);
    }
}

/* Rows in groups of ROWS: [I / ROWS][K][ROWS]. */
static void pack_strip(const Strip *from, i64 I, i64 K, float *to) {
    i64 done = from->by_i == 1 ? I / ROWS * ROWS : 0;
    if (done) pack_beside(from->data, from->by_k, done, K, to);
    to += done * K;
    for (i64 i = done; i < I; i += ROWS, to += ROWS * K) {
        const float *p = from->data + i * from->by_i;
        i64 rows = MIN(ROWS, I - i), by_i = from->by_i, by_k = from->by_k;
        if (rows == ROWS)
            for (i64 k = by_k == 1 ? pack_dense(p, by_i, K, to) : 0; k < K; k++)
                UNROLL for (int r = 0; r < ROWS; r++) to[k * ROWS + r] = p[r * by_i + k * by_k];
        else
            for (i64 k = 0; k < K; k++) for (i64 r = 0; r < rows; r++) to[k * ROWS + r] = p[r * by_i + k * by_k];
    }
}

/* I rows of bfloat16 from i0, as float32, in the order in which they lie. */
static Strip widen_strip(const Matrix *p, i64 i0, i64 I, i64 k0, i64 K, float *to) {
    i64 from = i0 * p->by_i + k0 * p->by_k;
    if (p->by_i == 1) {
        for (i64 k = 0; k < K; k++) read_dense(p, from + k * p->by_k, I, to + k * I);
        return (Strip){to, 1, I};
    }
    for (i64 i = 0; i < I; i++)
        if (p->by_k == 1) read_dense(p, from + i * p->by_i, K, to + i * K);
        else for (i64 k = 0; k < K; k++) to[i * K + k] = read_one(p, i0 + i, k0 + k);
    return (Strip){to, K, 1};
}

/* ---- the sums of a tile -------------------------------------------------------------------------------------- */

#if defined(__AVX__)
/* As `put`, for rows that lie side by side in out: eight lanes of eight rows (or of the last four) are turned at a time.
   Returns the rows that are done; fewer than four are left. */
static i64 put_turned(const float *sums, i64 ld, float *out, i64 out_j, i64 rows, i64 n, int first) {
    i64 r = 0;
    for (i64 some = 8; r + 4 <= rows; r += some) {
        some = rows - r < 8 ? 4 : 8;
        for (i64 j = 0; j < n; j += 8) {
            __m256 turned[8];
            float *to = out + r + j * out_j;
            transposed_8(sums + r * ld, j, ld, some, turned, 0);
            for (i64 l = 0; l < MIN(8, n - j); l++, to += out_j) {
                __m128 low = _mm256_castps256_ps128(turned[l]);
                if (some == 8) _mm256_storeu_ps(to, first ? turned[l] : _mm256_add_ps(_mm256_loadu_ps(to), turned[l]));
                else _mm_storeu_ps(to, first ? low : _mm_add_ps(_mm_loadu_ps(to), low));
            }
        }
    }
    return r;
}
#else
static i64 put_turned(const float *sums, i64 ld, float *out, i64 out_j, i64 rows, i64 n, int first) { return 0; }
#endif

/* The tile's sums into out: as they are where `first`, else added to what is there. */
static void put(const float *sums, i64 ld, float *out, i64 out_i, i64 out_j, i64 rows, i64 n, int first) {
    if (out_j == 1) {
        for (i64 r = 0; r < rows; r++, sums += ld, out += out_i) {
            i64 j = 0;
            for (; j + W <= n; j += W) store(out + j, first ? load(sums + j) : load(out + j) + load(sums + j));
            for (; j < n; j++) out[j] = first ? sums[j] : out[j] + sums[j];
        }
        return;
    }
    for (i64 r = out_i == 1 ? put_turned(sums, ld, out, out_j, rows, n, first) : 0; r < rows; r++)
        for (i64 j = 0; j < n; j++) {
            float *to = out + r * out_i + j * out_j, sum = sums[r * ld + j];
            *to = first ? sum : *to + sum;
        }
}

/* What stands in out, as a tile's sums lie; 0 where `first`. */
static void take(float *sums, i64 ld, const float *out, i64 out_i, i64 out_j, i64 rows, i64 n, int first) {
    if (first) memset(sums, 0, sizeof(float) * rows * ld);
    else for (i64 r = 0; r < rows; r++)
        if (out_j == 1) memcpy(sums + r * ld, out + r * out_i, sizeof(float) * n);
        else for (i64 j = 0; j < n; j++) sums[r * ld + j] = out[r * out_i + j * out_j];
}

/* ---- very few rows ------------------------------------------------------------------------------------------- */

/* A panel is not worth writing where few rows read it. Eight numbers of eight columns at a time are turned in registers
   instead, so a decode step of one row reads its weights once, as they lie. */
#if defined(__AVX__) && defined(__FMA__)
enum { TURNED, TURNED_HALF, BESIDE }; /* columns: dense along k, in float32 or in bfloat16; or side by side, in float32 */

/* out[l]: number k + l of eight columns from j on, of which there are n. */
INLINE void columns_8(const Matrix *q, i64 j, i64 k, i64 n, __m256 out[8], const int how) {
    i64 at = j * q->by_i + k * q->by_k;
    if (how == BESIDE) UNROLL for (int l = 0; l < 8; l++) {
        const float *from = (const float *)q->data + at + l * q->by_k;
        float some[8] = {0};
        if (n < 8) memcpy(some, from, sizeof(float) * n);
        out[l] = _mm256_loadu_ps(n < 8 ? some : from);
    }
    else transposed_8(q->data, at, q->by_i, n, out, how == TURNED_HALF);
}

/* R rows of p [R][K] times n columns from j on, in G groups of eight; of the last group those that are too many are not
   written. */
INLINE void few_groups(const Product *a, const float *p, i64 j, i64 n, int add, const int R, const int G, const int how) {
    const int chains = how == TURNED_HALF ? 2 : 1, terms = how == TURNED_HALF ? STEP : TERMS;
    float *out = a->out + j * a->out_j, found[R * G * 8] __attribute__((aligned(32)));
    __m256 total[R * G], sums[2][R * G];
    if (add)
        for (i64 r = 0; r < R; r++) for (i64 l = 0; l < n; l++) found[r * G * 8 + l] = out[r * a->out_i + l * a->out_j];
    UNROLL for (int i = 0; i < R * G; i++) total[i] = add ? _mm256_load_ps(found + 8 * i) : _mm256_setzero_ps();
    for (i64 k0 = 0; k0 < a->K; k0 += terms) {
        i64 end = MIN(a->K, k0 + terms), k = k0;
        UNROLL for (int i = 0; i < R * G; i++) sums[0][i] = sums[1][i] = _mm256_setzero_ps();
        for (; k + 8 <= end; k += 8)
            UNROLL for (int g = 0; g < G; g++) {
                __m256 q[8];
                columns_8(&a->q, j + 8 * g, k, n - 8 * g, q, how);
                UNROLL for (int l = 0; l < 8; l++) UNROLL for (int r = 0; r < R; r++) {
                    __m256 *sum = sums[l % chains] + r * G + g;
                    *sum = _mm256_fmadd_ps(_mm256_set1_ps(p[r * a->K + k + l]), q[l], *sum);
                }
            }
        for (; k < end; k++)
            UNROLL for (int g = 0; g < G; g++) {
                float q[8];
                for (int l = 0; l < 8; l++) q[l] = read_one(&a->q, j + MIN(8 * g + l, n - 1), k);
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < chains; c++) {
                    __m256 *sum = sums[c] + r * G + g;
                    if (k % chains == c) *sum = _mm256_fmadd_ps(_mm256_set1_ps(p[r * a->K + k]), _mm256_loadu_ps(q), *sum);
                }
            }
        UNROLL for (int i = 0; i < R * G; i++) {
            __m256 sum = chains == 2 ? _mm256_add_ps(sums[0][i], sums[1][i]) : sums[0][i];
            total[i] = k0 || add || chains == 2 ? _mm256_add_ps(total[i], sum) : sum;
        }
    }
    UNROLL for (int i = 0; i < R * G; i++) _mm256_store_ps(found + 8 * i, total[i]);
    for (i64 r = 0; r < R; r++) for (i64 l = 0; l < n; l++) out[r * a->out_i + l * a->out_j] = found[r * G * 8 + l];
}

INLINE void few_columns(const Product *a, const float *p, i64 j, i64 end, int add, const int R, const int how) {
    const int pairs = how != TURNED_HALF || R <= 2; /* registers are too few for four rows of two groups and two chains */
    for (; pairs && j + 16 <= end; j += 16) few_groups(a, p, j, 16, add, R, 2, how);
    for (; j < end; j += 8) few_groups(a, p, j, MIN(8, end - j), add, R, 1, how);
}

#define FEW_ROWS(R)                                                                                                    \
    case 3 * R + TURNED: few_columns(a, p, j, end, add, R, TURNED); break;                                             \
    case 3 * R + TURNED_HALF: few_columns(a, p, j, end, add, R, TURNED_HALF); break;                                   \
    case 3 * R + BESIDE: few_columns(a, p, j, end, add, R, BESIDE); break;

/* The columns from j to `end`. */
static __attribute__((noinline)) void columns_of(const Product *a, const float *p, i64 j, i64 end, int add) {
    switch (3 * a->I + (a->q.by_k != 1 ? BESIDE : a->q.half ? TURNED_HALF : TURNED)) {
        FEW_ROWS(1) FEW_ROWS(2) FEW_ROWS(3) FEW_ROWS(4)
    }
}

static void multiply_columns(const Product *a, const float *p, i64 j, i64 end, int add) {
    unsigned before = rounding(a->half);
    columns_of(a, p, j, end, add);
    round_as(before);
}

INLINE int is_few(const Product *a) {
    return a->I <= FEW && (a->q.by_k == 1 || (a->q.by_i == 1 && !a->q.half));
}

static int multiply_few(const Product *a, int add, int threads) {
    const i64 block = 64;
    float *p = scratch_bytes(sizeof(float) * a->I * a->K);
    if (!p) return 1;
    for (i64 i = 0; i < a->I; i++)
        if (a->p.by_k == 1) read_dense(&a->p, i * a->p.by_i, a->K, p + i * a->K);
        else for (i64 k = 0; k < a->K; k++) p[i * a->K + k] = read_one(&a->p, i, k);
    if (threads > 1) {
        _Pragma("omp parallel for schedule(static) num_threads(threads)")
        for (i64 j = 0; j < a->J; j += block) multiply_columns(a, p, j, MIN(a->J, j + block), add);
    } else
        multiply_columns(a, p, 0, a->J, add);
    free(p);
    return 0;
}
#else
INLINE int is_few(const Product *a) { return 0; }
static int multiply_few(const Product *a, int add, int threads) { return 1; }
#endif

/* ---- the whole ----------------------------------------------------------------------------------------------- */

/* `most` rows from i0 times all panels (of LANES lanes each, the last one perhaps of fewer). */
static void multiply_strip(const Product *a, const float *panels, i64 i0, i64 most, i64 j0, i64 J, i64 k0, i64 K,
                           int first) {
    i64 I = MIN(most, a->I - i0);
    /* `put_turned` reads eight lanes of a row that may have four */
    float packed[STRIP * TERMS + OVER] __attribute__((aligned(64))), sums[ROWS * LANES + 4] __attribute__((aligned(64)));
    const Matrix *m = &a->p;
    int pack = !m->half && (J > MANY_PANELS * LANES || m->by_k != 1) && I > ROWS;
    Strip strip = {(const float *)m->data + i0 * m->by_i + k0 * m->by_k, m->by_i, m->by_k};
    if (m->half) strip = widen_strip(m, i0, I, k0, K, packed);
    if (pack) pack_strip(&strip, I, K, packed);
    for (i64 j = 0; j < J; j += LANES) {
        i64 n = MIN(LANES, J - j), lanes = panel_lanes(n), step = lanes == W && !pack ? ROWS_1 : ROWS;
        if (a->half) step = lanes == W ? HALF_ROWS_1 : HALF_ROWS;
        for (i64 i = 0; i < I; i += step) {
            i64 rows = MIN(step, I - i);
            float *out = a->out + (i0 + i) * a->out_i + (j0 + j) * a->out_j;
            if (a->out_j == 1) /* what `put` adds to is there when the tile is done: up to a tenth of a product's time */
                for (i64 r = 0; r < rows; r++) __builtin_prefetch(out + r * a->out_i, 1);
            const float *p = pack ? packed + i * K : strip.data + i * strip.by_i;
            if (a->half) {
                take(sums, lanes, out, a->out_i, a->out_j, rows, n, first);
                (lanes == W ? half_tile_1 : half_tile_2)(p, strip.by_i, strip.by_k, panels + j * K, K, sums, rows);
            } else if (pack && rows == ROWS && lanes == LANES) tile_packed(p, panels + j * K, K, sums);
            else (lanes == W ? tile_1 : tile_2)(p, pack ? 1 : strip.by_i, pack ? ROWS : strip.by_k, panels + j * K, K, sums,
                                                rows, strip.by_k == 1 && !pack && !j);
            put(sums, lanes, out, a->out_i, a->out_j, rows, n, first || a->half);
        }
    }
}

/* The panels of J columns from j0 for the chains from k0 to `end`: each chain's `room` x TERMS numbers behind the last's. */
static void pack_panels(const Product *a, i64 k0, i64 end, i64 j0, i64 J, i64 room, float *panels, int threads) {
    for (i64 k = k0; k < end; k += TERMS, panels += TERMS * room) {
        i64 K = MIN(TERMS, end - k);
        if (threads > 1 && J * K > 1 << 14) {
            _Pragma("omp parallel for schedule(static) num_threads(threads)")
            for (i64 j = 0; j < J; j += LANES) pack_panel(a, k, K, j0, J, j, panels);
        } else
            for (i64 j = pack_panels_beside(a, k, K, j0, J, panels); j < J; j += LANES)
                pack_panel(a, k, K, j0, J, j, panels);
    }
}

/* The strip's rows times the same panels, chain after chain. */
static __attribute__((noinline)) void chains_of(const Product *a, const float *panels, i64 room, i64 i0, i64 most, i64 j0,
                                                i64 J, i64 k0, i64 end, int add) {
    for (i64 k = k0; k < end; k += TERMS)
        multiply_strip(a, panels + (k - k0) * room, i0, most, j0, J, k, MIN(TERMS, end - k), !k && !add);
}

static void multiply_chains(const Product *a, const float *panels, i64 room, i64 i0, i64 most, i64 j0, i64 J, i64 k0,
                            i64 end, int add) {
    unsigned before = rounding(a->half);
    chains_of(a, panels, room, i0, most, j0, J, k0, end, add);
    round_as(before);
}

static int multiply(const Product *a, int add, int threads) {
    i64 each = (a->I + threads - 1) / threads, strip = MIN(STRIP, (each + ROWS - 1) / ROWS * ROWS);
    i64 strips = (a->I + strip - 1) / strip, room = MIN(a->J, WIDE) + LANES;
    i64 deep = MAX(1, DEEP / (room * TERMS * (i64)sizeof(float))) * TERMS;
    float *panels = scratch_bytes(sizeof(float) * room * MIN(a->K, deep));
    if (!panels) return 1;
    for (i64 j0 = 0; j0 < a->J; j0 += WIDE)
        for (i64 k0 = 0; k0 < a->K; k0 += deep) {
            i64 J = MIN(WIDE, a->J - j0), end = MIN(a->K, k0 + deep);
            pack_panels(a, k0, end, j0, J, room, panels, threads);
            if (threads > 1) { /* even a team of one costs microseconds */
                _Pragma("omp parallel for schedule(dynamic) num_threads(threads)")
                for (i64 s = 0; s < strips; s++)
                    multiply_chains(a, panels, room, s * strip, strip, j0, J, k0, end, add);
            } else
                for (i64 s = 0; s < strips; s++)
                    multiply_chains(a, panels, room, s * strip, strip, j0, J, k0, end, add);
        }
    free(panels);
    return 0;
}

/* out (+)= a b for [I, K] and [K, J] of any strides. Returns 0, or 1 where memory ran out. What lies along the lanes is
   packed, K J or K I elements; with rows there, I J results are turned, at twice the cost. But a lane each would
   waste most lanes on very few rows. half: a and b are bfloat16. */
int whet_product(const void *a, i64 a_i, i64 a_k, const void *b, i64 b_k, i64 b_j, float *out, i64 out_i, i64 out_j,
                 i64 I, i64 J, i64 K, int half, int add, int threads) {
    if (!I || !J) return 0;
    if (!K) {
        for (i64 i = 0; !add && i < I; i++) for (i64 j = 0; j < J; j++) out[i * out_i + j * out_j] = 0;
        return 0;
    }
    if (2.0 * I * J * K < 1 << 18) threads = 1;
    Matrix left = {a, a_i, a_k, half}, right = {b, b_j, b_k, half};
    Product rows = {left, right, out, out_i, out_j, I, J, K, half};
    Product columns = {right, left, out, out_j, out_i, J, I, K, half};
    if (is_few(&rows)) return multiply_few(&rows, add, threads);
    if (is_few(&columns)) return multiply_few(&columns, add, threads);
    return multiply(I <= FEW || K * (J - I) <= 2 * I * J ? &rows : &columns, add, threads);
}

/* y = x w^T for rows that are dense. */
int whet_linear(const void *x, i64 x_i, const void *w, i64 w_j, float *y, i64 I, i64 J, i64 K, int half, int threads) {
    return whet_product(x, x_i, 1, w, 1, w_j, y, J, 1, I, J, K, half, 0, threads);
}

/* out[j] = the sum over i of x[i][j], in blocks of TERMS rows: what `whet_product` gives for a row of ones. */
void whet_column_sums(const float *x, i64 x_i, float *out, i64 I, i64 J) {
    for (i64 j = 0; j < J; j++) out[j] = 0;
    float part[WIDE];
    for (i64 j0 = 0; j0 < J; j0 += WIDE)
        for (i64 i0 = 0; i0 < I; i0 += TERMS) {
            i64 n = MIN(WIDE, J - j0);
            memset(part, 0, sizeof(float) * n);
            for (i64 i = i0; i < MIN(I, i0 + TERMS); i++) for (i64 j = 0; j < n; j++) part[j] += x[i * x_i + j0 + j];
            for (i64 j = 0; j < n; j++) out[j0 + j] += part[j];
        }
}
