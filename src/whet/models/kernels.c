/* CPU kernels of whet: what lies between the matrix products. fp32, no headers but the compiler's and libc's.

   The law of this file: a row (a token, a head) is computed in an order that depends on that row's own data alone.
   Sums run over 16 lanes by absolute index and are folded in one fixed tree; products accumulate one term after the
   other. Tiles, threads and neighbours therefore cannot change a bit, and a key counts the same whether it lies in
   a shared prompt, in the own part or in a page of the cache. Masked keys have weight exactly 0: adding them is exact.
   Nor can the width of the processor's vectors: see vectors.h.

   Strides are in floats. */

#include "vectors.h"

#define KEYS 16         /* keys of a page, and of a block of transposed keys: whole vectors for every W */
#define PARTS (KEYS / W) /* vectors of a block */

/* n floats (a vector's worth at most), the rest of the vector is `fill`: tails run through the same code as bodies. */
INLINE vf load_n(const float *p, i64 n, float fill) {
    if (n >= W) return load(p);
    vf x = all(fill);
    float part[W];
    memcpy(part, &x, sizeof part);
    if (n == W / 2) memcpy(part, p, sizeof part / 2);
    else for (i64 i = 0; i < n; i++) part[i] = p[i]; /* none where n < 1 */
    memcpy(&x, part, sizeof part);
    return x;
}

INLINE void store_n(float *p, vf x, i64 n) {
    if (n >= W) { store(p, x); return; }
    float part[W];
    memcpy(part, &x, sizeof part);
    if (n == W / 2) memcpy(p, part, sizeof part / 2);
    else for (i64 i = 0; i < n; i++) p[i] = part[i];
}

/* A sum or a maximum over a row: element i belongs to lane i % 16, whatever W is. */
typedef struct { vf part[PARTS]; } Lanes;

INLINE Lanes lanes(float x) {
    Lanes to;
    UNROLL for (int p = 0; p < PARTS; p++) to.part[p] = all(x);
    return to;
}

/* Halves of vectors, for trees: each level folds the upper half into the lower one. */
typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef int32_t i4 __attribute__((vector_size(16)));
#define HALVES(T, x, low, high) \
    T low, high;                \
    memcpy(&low, &(x), sizeof low), memcpy(&high, (const char *)&(x) + sizeof low, sizeof high);

INLINE float fold_sum(Lanes x) {
    HALVES(f8, x, low_8, high_8)
    low_8 += high_8;
    HALVES(f4, low_8, low_4, high_4)
    low_4 += high_4;
    return (low_4[0] + low_4[2]) + (low_4[1] + low_4[3]);
}

INLINE float larger(float a, float b) { return a > b ? a : b; }

INLINE float fold_max(vf x) {
#if W == 16
    HALVES(f8, x, low_8, high_8)
    i8 first_8 = low_8 > high_8;
    low_8 = (f8)(((i8)low_8 & first_8) | ((i8)high_8 & ~first_8));
#else
    vf low_8 = x;
#endif
#if W >= 8
    HALVES(f4, low_8, low_4, high_4)
    i4 first_4 = low_4 > high_4;
    low_4 = (f4)(((i4)low_4 & first_4) | ((i4)high_4 & ~first_4));
#else
    vf low_4 = x;
#endif
    return larger(larger(low_4[0], low_4[2]), larger(low_4[1], low_4[3]));
}

/* The body runs for every vector of a row of n floats, `at` floats in; its sums go to lane part `p`. */
#define EACH_VECTOR(at, p, n) \
    for (i64 at##_16 = 0; at##_16 < (n); at##_16 += 16) \
        UNROLL for (i64 p = 0, at = at##_16; p < PARTS; p++, at += W)

/* exp to about 1 ulp (Cephes expf); exactly 0 below the smallest normal number, so exp(-inf) is 0; NaN stays NaN. */
INLINE vf vexp(vf x) {
    vi dead = x < all(-87.33654f);
    x = pick(x > all(88.0f), all(88.0f), x);
    vf n = fma_v(x, all(1.44269504088896341f), all(12582912.0f)) - 12582912.0f; /* to the nearest integer */
    vf r = fma_v(n, all(-0.693359375f), x);
    r = fma_v(n, all(2.12194440e-4f), r);
    vf p = all(1.9875691500e-4f);
    p = fma_v(p, r, all(1.3981999507e-3f));
    p = fma_v(p, r, all(8.3334519073e-3f));
    p = fma_v(p, r, all(4.1665795894e-2f));
    p = fma_v(p, r, all(1.6666665459e-1f));
    p = fma_v(p, r, all(5.0000001201e-1f));
    p = fma_v(p, r * r, r);
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)(~dead & (vi)((p + 1.0f) * (vf)power));
}

/* tanh (Cephes tanhf): a polynomial near 0, where 1 - 2/(e^2x + 1) would lose digits. */
INLINE vf vtanh(vf x) {
    vf size = (vf)((vi)x & 0x7fffffff), z = x * x;
    vf p = all(-5.70498872745e-3f);
    p = fma_v(p, z, all(2.06390887954e-2f));
    p = fma_v(p, z, all(-5.37397155531e-2f));
    p = fma_v(p, z, all(1.33314422036e-1f));
    p = fma_v(p, z, all(-3.33332819422e-1f));
    vf near = fma_v(p * z, x, x);
    vf far = 1.0f - 2.0f / (vexp(size + size) + 1.0f);
    far = (vf)((vi)far | ((vi)x & (int32_t)0x80000000));
    return pick(size < all(0.625f), near, far);
}

/* erf(x), to 4e-7: x P(x^2) / Q(x^2), a fit of ours up to 3.92, where erf rounds to 1. */
INLINE vf verf(vf x) {
    vf size = (vf)((vi)x & 0x7fffffff), z = x * x;
    vf p = all(-1.27994850e-8f), q = all(6.23985616e-5f);
    p = fma_v(p, z, all(4.60916817e-6f));
    p = fma_v(p, z, all(3.76756972e-4f));
    p = fma_v(p, z, all(3.83863482e-3f));
    p = fma_v(p, z, all(5.42439893e-2f));
    p = fma_v(p, z, all(1.85135752e-1f));
    p = fma_v(p, z, all(1.12837923f));
    q = fma_v(q, z, all(1.30152481e-3f));
    q = fma_v(q, z, all(1.54300649e-2f));
    q = fma_v(q, z, all(1.13873906e-1f));
    q = fma_v(q, z, all(4.97405708e-1f));
    q = fma_v(q, z, all(1));
    vf near = (size * p) / q;
    near = pick((size >= all(3.92f)) | (near > all(1)), all(1), near); /* NaN is neither */
    return (vf)((vi)near | ((vi)x & (int32_t)0x80000000));
}

/* log(x) of a normal double, to about 1 ulp: 2 atanh((m - 1) / (m + 1)) + e log 2. The C library's differs by version. */
static double log_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (!(x >= 0)) return NAN;
    if (x < 2.2250738585072014e-308) return -INFINITY;
    if (isinf(x)) return x;
    int64_t e = (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) m *= 0.5, e++;
    double s = (m - 1.0) / (m + 1.0), z = s * s, p = 0;
    for (int k = 23; k >= 3; k -= 2) p = __builtin_fma(p, z, 1.0 / k);
    return __builtin_fma((double)e, 0.693147180559945309417, __builtin_fma(2.0 * s, p * z, 2.0 * s));
}

#define ROWS_IN_PARALLEL _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")
#define UNITS_IN_PARALLEL _Pragma("omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)")

/* ---- RMS norm, rotary embedding ------------------------------------------------------------------------------ */

#define CHUNK 64 /* rows whose weight gradients are summed in one chain; fixed, so that threads change nothing */

INLINE float inverse_rms(const float *x, i64 D, float eps) {
    Lanes sum = lanes(0);
    EACH_VECTOR(i, p, D) {
        vf a = load_n(x + i, D - i, 0);
        sum.part[p] = fma_v(a, a, sum.part[p]);
    }
    return 1.0f / sqrtf(fold_sum(sum) / (float)D + eps);
}

/* out = x * rms^-1 * (offset + w) for one row. */
INLINE void norm_row(const float *x, const float *w, float *out, i64 D, float eps, float offset) {
    vf scale = all(inverse_rms(x, D, eps));
    for (i64 i = 0; i < D; i += W)
        store_n(out + i, (load_n(x + i, D - i, 0) * scale) * (load_n(w + i, D - i, 0) + offset), D - i);
}

/* dx (plus `more`, where given) and the row's share of dw. dx = r (g - x r^2 mean(g x)) with g = dy (offset + w). */
INLINE void norm_row_backward(const float *x, const float *w, const float *dy, const float *more, float *dx,
                              float *dw, i64 D, float eps, float offset) {
    float r = inverse_rms(x, D, eps);
    Lanes dot = lanes(0);
    EACH_VECTOR(i, p, D) {
        vf a = load_n(x + i, D - i, 0), g = load_n(dy + i, D - i, 0);
        dot.part[p] = fma_v(g * (load_n(w + i, D - i, 0) + offset), a, dot.part[p]);
        store_n(dw + i, fma_v(g, a * r, load_n(dw + i, D - i, 0)), D - i);
    }
    float pull = fold_sum(dot) / (float)D * r * r;
    for (i64 i = 0; i < D; i += W) {
        vf g = load_n(dy + i, D - i, 0) * (load_n(w + i, D - i, 0) + offset);
        vf d = fma_v(load_n(x + i, D - i, 0), all(-pull), g) * r;
        if (more) d += load_n(more + i, D - i, 0);
        store_n(dx + i, d, D - i);
    }
}

static void sum_chunks(const float *part, float *dw, i64 chunks, i64 D) {
    for (i64 i = 0; i < D; i++) {
        double sum = 0;
        for (i64 c = 0; c < chunks; c++) sum += part[c * D + i];
        dw[i] = (float)sum;
    }
}

/* residual and sum may be NULL; else sum = x + residual and the sum is normed. */
void whet_rms_norm(const float *x, const float *residual, const float *w, float *out, float *sum, i64 N, i64 D,
                   float eps, float offset, int threads) {
    ROWS_IN_PARALLEL
    for (i64 n = 0; n < N; n++) {
        const float *row = x + n * D;
        if (residual) {
            for (i64 i = 0; i < D; i += W)
                store_n(sum + n * D + i, load_n(row + i, D - i, 0) + load_n(residual + n * D + i, D - i, 0), D - i);
            row = sum + n * D;
        }
        norm_row(row, w, out + n * D, D, eps, offset);
    }
}

/* part: [ceil(N / 64), D] of zeros. */
void whet_rms_norm_backward(const float *x, const float *w, const float *dy, const float *more, float *dx, float *dw,
                            float *part, i64 N, i64 D, float eps, float offset, int threads) {
    i64 chunks = (N + CHUNK - 1) / CHUNK;
    ROWS_IN_PARALLEL
    for (i64 c = 0; c < chunks; c++)
        for (i64 n = c * CHUNK; n < MIN(N, (c + 1) * CHUNK); n++)
            norm_row_backward(x + n * D, w, dy + n * D, more ? more + n * D : NULL, dx + n * D, part + c * D, D, eps,
                              offset);
    sum_chunks(part, dw, chunks, D);
}

/* out_i = x_i cos_i - x_{i+half} sin_i ; out_{i+half} = x_{i+half} cos_{i+half} + x_i sin_{i+half}. */
INLINE void rope_row(const float *x, const float *cos, const float *sin, float *out, i64 half) {
    for (i64 i = 0; i < half; i += W) {
        i64 n = half - i;
        vf low = load_n(x + i, n, 0), high = load_n(x + half + i, n, 0);
        store_n(out + i, fma_v(low, load_n(cos + i, n, 0), -high * load_n(sin + i, n, 0)), n);
        store_n(out + half + i, fma_v(high, load_n(cos + half + i, n, 0), low * load_n(sin + half + i, n, 0)), n);
    }
}

INLINE void rope_row_backward(const float *dy, const float *cos, const float *sin, float *dx, i64 half) {
    for (i64 i = 0; i < half; i += W) {
        i64 n = half - i;
        vf low = load_n(dy + i, n, 0), high = load_n(dy + half + i, n, 0);
        store_n(dx + i, fma_v(low, load_n(cos + i, n, 0), high * load_n(sin + half + i, n, 0)), n);
        store_n(dx + half + i, fma_v(high, load_n(cos + half + i, n, 0), -low * load_n(sin + i, n, 0)), n);
    }
}

#define MAX_HEAD 512

/* x: token stride x_n, head stride x_h; out, dy, dx contiguous [N, H, D]; w may be NULL: no norm. */
void whet_norm_rope(const float *x, i64 x_n, i64 x_h, const float *w, const float *cos, const float *sin, float *out,
                    i64 N, i64 H, i64 D, float eps, float offset, int threads) {
    ROWS_IN_PARALLEL
    for (i64 n = 0; n < N; n++)
        for (i64 h = 0; h < H; h++) {
            float normed[MAX_HEAD];
            const float *row = x + n * x_n + h * x_h;
            if (w) {
                norm_row(row, w, normed, D, eps, offset);
                row = normed;
            }
            rope_row(row, cos + n * D, sin + n * D, out + (n * H + h) * D, D / 2);
        }
}

void whet_norm_rope_backward(const float *x, i64 x_n, i64 x_h, const float *w, const float *cos, const float *sin,
                             const float *dy, float *dx, float *dw, float *part, i64 N, i64 H, i64 D, float eps,
                             float offset, int threads) {
    i64 chunks = (N + CHUNK - 1) / CHUNK;
    ROWS_IN_PARALLEL
    for (i64 c = 0; c < chunks; c++)
        for (i64 n = c * CHUNK; n < MIN(N, (c + 1) * CHUNK); n++)
            for (i64 h = 0; h < H; h++) {
                float turned[MAX_HEAD], *out = dx + (n * H + h) * D;
                rope_row_backward(dy + (n * H + h) * D, cos + n * D, sin + n * D, w ? turned : out, D / 2);
                if (w)
                    norm_row_backward(x + n * x_n + h * x_h, w, turned, NULL, out, part + c * D, D, eps, offset);
            }
    if (w) sum_chunks(part, dw, chunks, D);
}

/* ---- gated linear unit --------------------------------------------------------------------------------------- */

#define CLAMPED 2 /* act: gpt-oss's, (clamp(up) + 1) * g sigmoid(1.702 g) of g = min(gate, 7), up within -7 .. 7 */
#define CLAMP 7.0f

INLINE vf clamp_up(vf up) { return pick(up > all(CLAMP), all(CLAMP), pick(up < all(-CLAMP), all(-CLAMP), up)); }

/* act(g), and its derivative. act 0: silu, 1: gelu (tanh form), CLAMPED, 3: tanh, 4: sigmoid, 5: gelu, 6: erf. */
INLINE vf activate(vf g, int act, vf *slope) {
    if (act == 5) {
        vf half = 0.5f * (1.0f + verf(0.70710678f * g));
        *slope = fma_v(0.39894228f * g, vexp(-0.5f * (g * g)), half);
        return g * half;
    }
    if (act == 6) {
        *slope = 1.1283792f * vexp(-(g * g));
        return verf(g);
    }
    if (act == 3) {
        vf t = vtanh(g);
        *slope = fma_v(-t, t, all(1));
        return t;
    }
    if (act == 4) {
        vf s = 1.0f / (1.0f + vexp(-g));
        *slope = s * (1.0f - s);
        return s;
    }
    if (act == CLAMPED) {
        vi clamped = g > all(CLAMP);
        g = pick(clamped, all(CLAMP), g);
        vf s = 1.0f / (1.0f + vexp(-1.702f * g));
        *slope = pick(clamped, all(0), s * fma_v(1.702f * g, 1.0f - s, all(1)));
        return g * s;
    }
    if (act == 0) {
        vf s = 1.0f / (1.0f + vexp(-g));
        *slope = s * fma_v(g, 1.0f - s, all(1));
        return g * s;
    }
    vf g2 = g * g;
    vf t = vtanh(0.7978845608f * (g * fma_v(all(0.044715f), g2, all(1))));
    vf half = 0.5f * (1.0f + t);
    vf inner = 0.7978845608f * fma_v(all(0.134145f), g2, all(1));
    *slope = fma_v(0.5f * g, fma_v(-t, t, all(1)) * inner, half);
    return g * half;
}

/* Numbers of float32, or of bfloat16 where `half`, from number `at` on; n of them, or W. */
INLINE vf read_n(const void *p, i64 at, i64 n, const int half) {
    if (!half) return load_n((const float *)p + at, n, 0);
    vh x = {0};
    if (n >= W) memcpy(&x, (const uint16_t *)p + at, sizeof x);
    else if (n > 0) memcpy(&x, (const uint16_t *)p + at, sizeof(uint16_t) * n);
    return widen(x);
}

INLINE void write_n(void *p, i64 at, vf x, i64 n, const int half) {
    if (!half) {
        store_n((float *)p + at, x, n);
        return;
    }
    vh y = narrow(x);
    if (n >= W) memcpy((uint16_t *)p + at, &y, sizeof y);
    else memcpy((uint16_t *)p + at, &y, sizeof(uint16_t) * n);
}

INLINE void glu_row(const void *gate, i64 gate_at, const void *up, i64 up_at, void *out, i64 at, i64 F, int act,
                    const int half) {
    for (i64 i = 0; i < F; i += W) {
        vf slope;
        vf y = activate(read_n(gate, gate_at + i, F - i, half), act, &slope), u = read_n(up, up_at + i, F - i, half);
        write_n(out, at + i, y * (act == CLAMPED ? clamp_up(u) + 1.0f : u), F - i, half);
    }
}

INLINE void glu_row_backward(const void *gate, i64 gate_at, const void *up, i64 up_at, const void *dout, void *dgate,
                             void *dup, i64 at, i64 F, int act, const int half) {
    for (i64 i = 0; i < F; i += W) {
        vf slope, d = read_n(dout, at + i, F - i, half);
        vf y = activate(read_n(gate, gate_at + i, F - i, half), act, &slope);
        vf u = read_n(up, up_at + i, F - i, half), dy = d * y;
        if (act == CLAMPED) {
            vf bounded = clamp_up(u);
            dy = pick(bounded == u, dy, all(0)), u = bounded + 1.0f;
        }
        write_n(dup, at + i, dy, F - i, half);
        write_n(dgate, at + i, (d * u) * slope, F - i, half);
    }
}

/* gate and up have row strides; out is contiguous. half: all are bfloat16, computed in float32 and rounded. */
void whet_glu(const void *gate, i64 gate_n, const void *up, i64 up_n, void *out, i64 N, i64 F, int act, int half,
              int threads) {
    ROWS_IN_PARALLEL
    for (i64 n = 0; n < N; n++)
        if (half) glu_row(gate, n * gate_n, up, n * up_n, out, n * F, F, act, 1);
        else glu_row(gate, n * gate_n, up, n * up_n, out, n * F, F, act, 0);
}

void whet_glu_backward(const void *gate, i64 gate_n, const void *up, i64 up_n, const void *dout, void *dgate, void *dup,
                       i64 N, i64 F, int act, int half, int threads) {
    ROWS_IN_PARALLEL
    for (i64 n = 0; n < N; n++)
        if (half) glu_row_backward(gate, n * gate_n, up, n * up_n, dout, dgate, dup, n * F, F, act, 1);
        else glu_row_backward(gate, n * gate_n, up, n * up_n, dout, dgate, dup, n * F, F, act, 0);
}

typedef double vd __attribute__((vector_size(8 * W)));

INLINE double square_sum(const void *x, i64 n, const int half) {
    vd part[16 / W] = {0}; /* 16 lanes, whatever the width of vectors */
    for (i64 i = 0; i < n; i += 16)
        UNROLL for (int p = 0; p < 16 / W; p++) {
            vd a = __builtin_convertvector(read_n(x, i + p * W, n - i - p * W, half), vd);
            part[p] += a * a;
        }
    double lanes[16];
    memcpy(lanes, part, sizeof lanes);
    for (int w = 8; w; w /= 2) for (int l = 0; l < w; l++) lanes[l] += lanes[l + w];
    return lanes[0];
}

/* The sum of the squares of n numbers of float32, or of bfloat16. A square is exact in float64. */
double whet_square_sum(const void *x, i64 n, int half) { return half ? square_sum(x, n, 1) : square_sum(x, n, 0); }

#define ELEMENTS 4096 /* of a task; a multiple of every width */

/* out = act(x) of n numbers; x may be out. Each depends on itself alone, wherever it stands. */
void whet_activate(const float *x, float *out, i64 n, int act, int threads) {
    ROWS_IN_PARALLEL
    for (i64 from = 0; from < n; from += ELEMENTS)
        for (i64 i = from; i < MIN(n, from + ELEMENTS); i += W) {
            vf slope;
            store_n(out + i, activate(load_n(x + i, n - i, 0), act, &slope), n - i);
        }
}

void whet_activate_backward(const float *x, const float *dout, float *dx, i64 n, int act, int threads) {
    ROWS_IN_PARALLEL
    for (i64 from = 0; from < n; from += ELEMENTS)
        for (i64 i = from; i < MIN(n, from + ELEMENTS); i += W) {
            vf slope;
            activate(load_n(x + i, n - i, 0), act, &slope);
            store_n(dx + i, load_n(dout + i, n - i, 0) * slope, n - i);
        }
}

/* ---- log-probs and sampling ---------------------------------------------------------------------------------- */

#define BLOCK 256 /* logits summed in fp32 before the sum goes on in double */

/* Maximum and sum of exp(x - maximum). Where wanted: the sum of exp(x - max) (x - max), and the blocks' sums. */
INLINE double softmax_total(const float *x, i64 V, float *max_out, double *weighted, double *blocks) {
    vf top = all(-INFINITY);
    for (i64 i = 0; i < V; i += W) top = vmax(load_n(x + i, V - i, -INFINITY), top);
    float max = fold_max(top);
    double total = 0, moment = 0;
    for (i64 b = 0; b < V; b += BLOCK) {
        Lanes sum = lanes(0), sum_x = lanes(0);
        EACH_VECTOR(i, p, MIN(BLOCK, V - b)) {
            vf z = load_n(x + b + i, V - b - i, -INFINITY) - max, e = vexp(z);
            sum.part[p] += e;
            if (weighted) /* e is 0 where z is held; 0 * -inf would be NaN */
                sum_x.part[p] = fma_v(e, vmax(z, all(-200.0f)), sum_x.part[p]);
        }
        double part = fold_sum(sum);
        if (blocks) blocks[b / BLOCK] = part;
        total += part;
        if (weighted) moment += fold_sum(sum_x);
    }
    if (weighted) *weighted = moment;
    *max_out = max;
    return total;
}

INLINE float token_logp(const float *x, i64 token, float max, double total) {
    return (float)((double)(x[token] - max) - log_of(total));
}

void whet_logprobs(const float *logits, const i64 *target, float *logp, float *entropy, i64 N, i64 V, int threads) {
    ROWS_IN_PARALLEL
    for (i64 n = 0; n < N; n++) {
        float max;
        double moment, total = softmax_total(logits + n * V, V, &max, &moment, NULL);
        logp[n] = token_logp(logits + n * V, target[n], max, total);
        entropy[n] = (float)(log_of(total) - moment / total);
    }
}

/* In place: logits become p (-dentropy (log p + H) - dlogp), + dlogp at the target. dentropy may be NULL. */
void whet_logprobs_backward(float *logits, const i64 *target, const float *logp, const float *entropy,
                            const float *dlogp, const float *dentropy, i64 N, i64 V, int threads) {
    ROWS_IN_PARALLEL
    for (i64 n = 0; n < N; n++) {
        float *x = logits + n * V;
        float lse = (float)((double)x[target[n]] - (double)logp[n]);
        float pull = dentropy ? dentropy[n] : 0, push = dlogp[n], h = entropy[n];
        for (i64 i = 0; i < V; i += W) {
            vf z = load_n(x + i, V - i, -INFINITY) - lse, p = vexp(z);
            vf g = vmax(z, all(-200.0f)) + h;
            store_n(x + i, p * fma_v(g, all(-pull), all(-push)), V - i);
        }
        x[target[n]] += push;
    }
}

/* First index with cumulative mass > x in one block, else the block's last index with any mass. */
static i64 draw_in_block(const float *logits, i64 from, i64 to, float max, double x) {
    double seen = 0;
    i64 last = from;
    for (i64 i = from; i < to; i += W) {
        float mass[W];
        vf e = vexp(load_n(logits + i, to - i, -INFINITY) - max);
        memcpy(mass, &e, sizeof mass);
        for (i64 j = 0; j < W; j++) {
            if (!(mass[j] > 0)) continue;
            seen += mass[j];
            last = i + j;
            if (seen > x) return last;
        }
    }
    return last;
}

/* Inverse CDF at uniform in [0, 1). Returns the number of rows without a distribution (NaN, +inf, all -inf). */
i64 whet_sample(const float *logits, const double *uniform, i64 *token, float *logp, i64 B, i64 V, int threads) {
    i64 bad = 0, count = (V + BLOCK - 1) / BLOCK;
    double *sums = malloc(sizeof(double) * B * count);
    if (!sums) return -1;
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(+ : bad)")
    for (i64 b = 0; b < B; b++) {
        const float *row = logits + b * V;
        float max;
        double *sum = sums + b * count, total = softmax_total(row, V, &max, NULL, sum);
        token[b] = 0, logp[b] = 0;
        if (!(total > 0) || isinf(total)) {
            bad++;
            continue;
        }
        double x = uniform[b] * total, before = 0, start = 0;
        i64 chosen = -1;
        for (i64 i = 0; i < count && chosen < 0; i++) {
            if (before + sum[i] > x) chosen = i, start = before;
            before += sum[i];
        }
        if (chosen < 0) { /* u * total rounded up to total: the last block with any mass */
            for (chosen = count - 1; !(sum[chosen] > 0);) chosen--;
            start = -INFINITY;
        }
        token[b] = draw_in_block(row, chosen * BLOCK, MIN(V, (chosen + 1) * BLOCK), max, x - start);
        logp[b] = token_logp(row, token[b], max, total);
    }
    free(sums);
    return bad;
}

/* ---- attention: micro kernels -------------------------------------------------------------------------------- */

/* s[r][16 b + lane] = sum over d of q[r][d] kt[b][d][lane], one term after the other, for NQ rows and NB blocks. */
INLINE void score_tile(const float *q, const float *const *kt, float *s, i64 ld, i64 D, const int NQ, const int NB) {
    vf acc[16];
    UNROLL for (int i = 0; i < NQ * NB * PARTS; i++) acc[i] = all(0);
    for (i64 d = 0; d < D; d++)
        UNROLL for (int b = 0; b < NB * PARTS; b++) {
            vf k = load(kt[b / PARTS] + d * KEYS + b % PARTS * W);
            UNROLL for (int r = 0; r < NQ; r++)
                acc[r * NB * PARTS + b] = fma_v(all(q[r * D + d]), k, acc[r * NB * PARTS + b]);
        }
    UNROLL for (int r = 0; r < NQ; r++)
        UNROLL for (int b = 0; b < NB * PARTS; b++) store(s + r * ld + b * W, acc[r * NB * PARTS + b]);
}

#define SCORE_BLOCKS(NQ, NB) \
    for (; b + (NB) <= blocks; b += (NB)) score_tile(q + r * D, kt + b, s + r * ld + b * KEYS, ld, D, NQ, NB);
#define SCORE_ROWS(NQ, NB) \
    for (; rows - r >= NQ; r += NQ) {     \
        i64 b = 0;                        \
        SCORE_BLOCKS(NQ, NB)              \
        if (NB > 2) SCORE_BLOCKS(NQ, MIN(NB, 2)) \
        SCORE_BLOCKS(NQ, 1)               \
    }

/* Tiles are cut so that accumulators, operands and a broadcast fit the registers. */
static void scores(const float *q, i64 rows, const float *const *kt, i64 blocks, float *s, i64 ld, i64 D) {
    i64 r = 0;
#if W == 16
    SCORE_ROWS(8, 2) SCORE_ROWS(4, 4) SCORE_ROWS(2, 4) SCORE_ROWS(1, 4)
#elif W == 8
    SCORE_ROWS(6, 1) SCORE_ROWS(4, 1) SCORE_ROWS(2, 2) SCORE_ROWS(1, 4)
#else
    SCORE_ROWS(4, 1) SCORE_ROWS(2, 1) SCORE_ROWS(1, 2)
#endif
}

/* c[r][:] += sum over k of a[r a_r + k a_k] b[k][:], one term after the other, for NR rows of ND vectors. */
INLINE void weigh_tile(float *c, i64 c_r, const float *a, i64 a_r, i64 a_k, const float *b, i64 b_k, i64 K,
                       const int NR, const int ND) {
    vf acc[16];
    UNROLL for (int r = 0; r < NR; r++)
        UNROLL for (int d = 0; d < ND; d++) acc[r * ND + d] = load(c + r * c_r + d * W);
    for (i64 k = 0; k < K; k++) {
        vf x[4];
        UNROLL for (int d = 0; d < ND; d++) x[d] = load(b + k * b_k + d * W);
        UNROLL for (int r = 0; r < NR; r++)
            UNROLL for (int d = 0; d < ND; d++)
                acc[r * ND + d] = fma_v(all(a[r * a_r + k * a_k]), x[d], acc[r * ND + d]);
    }
    UNROLL for (int r = 0; r < NR; r++)
        UNROLL for (int d = 0; d < ND; d++) store(c + r * c_r + d * W, acc[r * ND + d]);
}

#define WEIGH_TILES(NR, ND)        \
    for (; d + ND * W <= D; d += ND * W) \
        weigh_tile(c + r * c_r + d, c_r, a + r * a_r, a_r, a_k, b + d, b_k, K, NR, ND);
#define WEIGH_ROWS(NR, FIRST, THEN, LAST)                                   \
    for (; rows - r >= NR; r += NR) {                                       \
        i64 d = 0;                                                          \
        WEIGH_TILES(NR, FIRST) WEIGH_TILES(NR, THEN) WEIGH_TILES(NR, LAST) \
    }

/* D is a multiple of 16. */
static void weigh(float *c, i64 c_r, const float *a, i64 a_r, i64 a_k, const float *b, i64 b_k, i64 K, i64 rows,
                  i64 D) {
    i64 r = 0;
#if W == 16
    WEIGH_ROWS(8, 2, 2, 1) WEIGH_ROWS(4, 4, 2, 1) WEIGH_ROWS(2, 4, 2, 1) WEIGH_ROWS(1, 4, 2, 1)
#elif W == 8
    WEIGH_ROWS(6, 2, 2, 2) WEIGH_ROWS(4, 2, 2, 2) WEIGH_ROWS(2, 4, 2, 2) WEIGH_ROWS(1, 4, 2, 2)
#else
    WEIGH_ROWS(4, 4, 4, 4) WEIGH_ROWS(2, 4, 4, 4) WEIGH_ROWS(1, 4, 4, 4)
#endif
}

INLINE vf soft_cap(vf s, float cap) { return cap * vtanh(s / cap); }

/* One row of scores at positions from .. from + 16 blocks - 1, of which lo .. hi are seen, becomes exp(s - max).
   Returns the sum. Blocks before lo add exact zeros, so the sum does not depend on `from`. */
INLINE float soft_row(float *s, i64 from, i64 blocks, i64 lo, i64 hi, float cap, float *max_out) {
    i64 end = from + blocks * KEYS;
    if (cap > 0)
        for (i64 i = 0; i < blocks * KEYS; i += W) store(s + i, soft_cap(load(s + i), cap));
    for (i64 t = from; t < lo; t++) s[t - from] = -INFINITY;
    for (i64 t = hi + 1; t < end; t++) s[t - from] = -INFINITY;
    vf top = all(-INFINITY);
    for (i64 i = 0; i < blocks * KEYS; i += W) top = vmax(load(s + i), top);
    float max = fold_max(top);
    Lanes sum = lanes(0);
    EACH_VECTOR(i, p, blocks * KEYS) {
        vf e = vexp(load(s + i) - max);
        sum.part[p] += e;
        store(s + i, e);
    }
    *max_out = max;
    return fold_sum(sum);
}

/* The factor of a row's weighed values, of which `part` is the sum of exp(score - max); max and part become those of the
   scores and the head's sink: a score that weighs nothing. */
INLINE float sunk(const float *sinks, i64 head, float *part, float *max) {
    if (!sinks) return 1.0f / *part;
    float top = larger(*max, sinks[head]), shrink = vexp(all(*max - top))[0];
    *part = *part * shrink + vexp(all(sinks[head] - top))[0], *max = top;
    return shrink / *part;
}

INLINE void scale_row(const float *x, float *out, float by, i64 D) {
    for (i64 i = 0; i < D; i += W) store(out + i, load(x + i) * by);
}

/* ---- attention of a packed batch ----------------------------------------------------------------------------- */

typedef struct {
    const float *q, *k, *v;
    i64 q_n, q_h, k_n, k_h, v_n, v_h; /* token and head strides */
    i64 heads, kv_heads, D;
    i64 window; /* 0: none */
    float scale, cap; /* cap 0: none */
    const float *sinks; /* [heads], or NULL */
    const i64 *q_start, *q_len, *prefix_start, *prefix_len; /* per segment */
    const i64 *order, *family_start; /* segments sorted by family; where each family starts in that order */
    i64 families, threads;
} Packed;

/* Keys or values of one segment and one kv head in blocks of 16, transposed: block[b][d][lane], position 16 b + lane. */
typedef struct {
    float *data;
    const float **block;
    i64 prefix_start, prefix_blocks; /* what the full prefix blocks hold now: reused by the next segment of the family */
} Blocks;

INLINE i64 token_at(i64 t, i64 prefix, i64 prefix_start, i64 q_start) {
    return t < prefix ? prefix_start + t : q_start + t - prefix;
}

static void fill_blocks(Blocks *to, const float *x, i64 x_n, i64 D, i64 from, i64 until, i64 prefix, i64 prefix_start,
                        i64 q_start, i64 keys) {
    for (i64 b = from; b < until; b++) {
        float *block = to->data + b * D * KEYS;
        to->block[b] = block;
        for (i64 lane = 0; lane < KEYS; lane++) {
            i64 t = b * KEYS + lane;
            const float *row = x + token_at(t, prefix, prefix_start, q_start) * x_n;
            if (t < keys) for (i64 d = 0; d < D; d++) block[d * KEYS + lane] = row[d];
            else for (i64 d = 0; d < D; d++) block[d * KEYS + lane] = 0;
        }
    }
}

static void transpose_segment(Blocks *to, const float *x, i64 x_n, i64 D, const Packed *a, i64 s) {
    i64 prefix = a->prefix_len[s], start = a->prefix_start[s], keys = prefix + a->q_len[s], full = prefix / KEYS;
    i64 have = (to->prefix_start == start) ? MIN(full, to->prefix_blocks) : 0;
    fill_blocks(to, x, x_n, D, have, (keys + KEYS - 1) / KEYS, prefix, start, a->q_start[s], keys);
    to->prefix_start = start;
    to->prefix_blocks = full;
}

static i64 most_keys(const Packed *a, i64 family) {
    i64 most = 0;
    for (i64 i = a->family_start[family]; i < a->family_start[family + 1]; i++)
        most = MAX(most, a->prefix_len[a->order[i]] + a->q_len[a->order[i]]);
    return most;
}

#define QUERY_ROWS 16 /* query rows (token x head of the group) of a forward tile, if a group is not larger */
#define GRAD_ROWS 32
#define KEY_CHUNK 32 /* key blocks of a backward tile */

/* The tile's part of c[r][:] += a[r][t] x[t][:] over positions t0 .. t1-1: first the prefix, then the own keys. */
INLINE void weigh_keys(float *c, i64 c_r, const float *a, i64 a_r, const float *x, i64 x_n, i64 t0, i64 t1, i64 prefix,
                       i64 prefix_start, i64 q_start, i64 rows, i64 D) {
    i64 cut = MAX(t0, MIN(t1, prefix));
    if (cut > t0) weigh(c, c_r, a, a_r, 1, x + (prefix_start + t0) * x_n, x_n, cut - t0, rows, D);
    if (t1 > cut)
        weigh(c, c_r, a + (cut - t0), a_r, 1, x + (q_start + cut - prefix) * x_n, x_n, t1 - cut, rows, D);
}

INLINE i64 first_seen(i64 position, i64 window) { return window ? MAX(0, position - window + 1) : 0; }

static void forward_tile(const Packed *a, const Blocks *keys, i64 s, i64 kv, i64 from, i64 tokens, float *scratch,
                         float *out, float *lse) {
    i64 group = a->heads / a->kv_heads, rows = tokens * group, D = a->D, prefix = a->prefix_len[s];
    i64 first = prefix + from, last = first + tokens - 1;
    i64 b0 = first_seen(first, a->window) / KEYS, blocks = last / KEYS + 1 - b0, ld = blocks * KEYS;
    float *q = scratch, *sum = q + rows * D, *p = sum + rows * D, by[rows];
    for (i64 r = 0; r < rows; r++)
        scale_row(a->q + (a->q_start[s] + from + r / group) * a->q_n + (kv * group + r % group) * a->q_h, q + r * D,
                  a->scale, D);
    scores(q, rows, keys->block + b0, blocks, p, ld, D);
    for (i64 r = 0; r < rows; r++) {
        i64 at = first + r / group;
        float max, total = soft_row(p + r * ld, b0 * KEYS, blocks, first_seen(at, a->window), at, a->cap, &max);
        by[r] = sunk(a->sinks, kv * group + r % group, &total, &max);
        lse[(a->q_start[s] + from + r / group) * a->heads + kv * group + r % group] = (float)((double)max + log_of(total));
    }
    memset(sum, 0, sizeof(float) * rows * D);
    weigh_keys(sum, D, p, ld, a->v + kv * a->v_h, a->v_n, b0 * KEYS, last + 1, prefix, a->prefix_start[s],
               a->q_start[s], rows, D);
    for (i64 r = 0; r < rows; r++)
        scale_row(sum + r * D, out + ((a->q_start[s] + from + r / group) * a->heads + kv * group + r % group) * D,
                  by[r], D);
}

/* out [N, heads, D], lse [N, heads]. Returns 0, or 1 where memory ran out. */
int whet_attend_packed(const Packed *a, float *out, float *lse) {
    int threads = (int)a->threads, failed = 0;
    i64 group = a->heads / a->kv_heads, D = a->D, step = MAX(1, QUERY_ROWS / group);
    UNITS_IN_PARALLEL
    for (i64 unit = 0; unit < a->families * a->kv_heads; unit++) {
        i64 family = unit / a->kv_heads, kv = unit % a->kv_heads;
        i64 blocks = (most_keys(a, family) + KEYS - 1) / KEYS, rows = step * group;
        float *data = scratch_bytes(sizeof(float) * (blocks * KEYS * (D + rows) + 2 * rows * D) + sizeof(float *) * blocks);
        if (!data) {
            failed = 1;
            continue;
        }
        Blocks keys = {data, (const float **)(data + blocks * KEYS * (D + rows) + 2 * rows * D), -1, 0};
        for (i64 i = a->family_start[family]; i < a->family_start[family + 1]; i++) {
            i64 s = a->order[i];
            transpose_segment(&keys, a->k + kv * a->k_h, a->k_n, D, a, s);
            for (i64 from = 0; from < a->q_len[s]; from += step)
                forward_tile(a, &keys, s, kv, from, MIN(step, a->q_len[s] - from), data + blocks * KEYS * D, out, lse);
        }
        free(data);
    }
    return failed;
}

/* Row r of a tile: scores s and dp = dout . v become p and ds, the gradient of the scaled score. */
INLINE void grad_row(float *s, float *dp, i64 from, i64 blocks, i64 lo, i64 hi, float cap, float lse, float delta) {
    for (i64 i = 0; i < blocks * KEYS; i += W) {
        vf z = load(s + i), slope = all(1);
        if (cap > 0) {
            vf t = vtanh(z / cap);
            slope = fma_v(-t, t, all(1));
            z = cap * t;
        }
        vf p = vexp(z - lse);
        store(s + i, p);
        store(dp + i, (p * (load(dp + i) - delta)) * slope);
    }
    i64 end = from + blocks * KEYS;
    for (i64 t = from; t < MIN(lo, end); t++) s[t - from] = dp[t - from] = 0;
    for (i64 t = MAX(from, hi + 1); t < end; t++) s[t - from] = dp[t - from] = 0;
}

typedef struct {
    const float *out, *lse, *dout; /* [N, heads, D], [N, heads], [N, heads, D] */
    float *dq, *dk, *dv; /* [N, heads, D], [N, kv_heads, D] twice; dk and dv start as zeros */
} Grads;

static void backward_tile(const Packed *a, const Grads *g, const Blocks *keys, const Blocks *values, i64 s, i64 kv,
                          i64 from, i64 tokens, float *scratch) {
    i64 group = a->heads / a->kv_heads, rows = tokens * group, D = a->D, prefix = a->prefix_len[s];
    i64 q_start = a->q_start[s], prefix_start = a->prefix_start[s], kv_n = a->kv_heads * D, ld = KEY_CHUNK * KEYS;
    i64 first = prefix + from, last = first + tokens - 1;
    float *q = scratch, *dout = q + rows * D, *dq = dout + rows * D, *p = dq + rows * D, *ds = p + rows * ld;
    float lse[rows], delta[rows];
    for (i64 r = 0; r < rows; r++) {
        i64 n = q_start + from + r / group, h = kv * group + r % group;
        scale_row(a->q + n * a->q_n + h * a->q_h, q + r * D, a->scale, D);
        memcpy(dout + r * D, g->dout + (n * a->heads + h) * D, sizeof(float) * D);
        Lanes dot = lanes(0);
        EACH_VECTOR(i, p, D)
            dot.part[p] = fma_v(load(dout + r * D + i), load(g->out + (n * a->heads + h) * D + i), dot.part[p]);
        lse[r] = g->lse[n * a->heads + h], delta[r] = fold_sum(dot);
    }
    memset(dq, 0, sizeof(float) * rows * D);
    for (i64 b = first_seen(first, a->window) / KEYS; b <= last / KEYS; b += KEY_CHUNK) {
        i64 blocks = MIN(KEY_CHUNK, last / KEYS + 1 - b), t0 = b * KEYS, t1 = MIN(last + 1, t0 + blocks * KEYS);
        scores(q, rows, keys->block + b, blocks, p, ld, D);
        scores(dout, rows, values->block + b, blocks, ds, ld, D);
        for (i64 r = 0; r < rows; r++) {
            i64 at = first + r / group;
            grad_row(p + r * ld, ds + r * ld, t0, blocks, first_seen(at, a->window), at, a->cap, lse[r], delta[r]);
        }
        weigh_keys(dq, D, ds, ld, a->k + kv * a->k_h, a->k_n, t0, t1, prefix, prefix_start, q_start, rows, D);
        i64 cut = MAX(t0, MIN(t1, prefix)); /* dk, dv of the prefix's keys, then of the own ones */
        i64 at[2] = {prefix_start + t0, q_start + cut - prefix}, skip[2] = {0, cut - t0}, n[2] = {cut - t0, t1 - cut};
        for (int part = 0; part < 2; part++) {
            weigh(g->dk + at[part] * kv_n + kv * D, kv_n, ds + skip[part], 1, ld, q, D, rows, n[part], D);
            weigh(g->dv + at[part] * kv_n + kv * D, kv_n, p + skip[part], 1, ld, dout, D, rows, n[part], D);
        }
    }
    for (i64 r = 0; r < rows; r++)
        scale_row(dq + r * D, g->dq + ((q_start + from + r / group) * a->heads + kv * group + r % group) * D, a->scale,
                  D);
}

/* A unit is a prefix family and a kv head: nobody else adds to its dk and dv, so threads cannot change the sums. */
int whet_attend_packed_backward(const Packed *a, const Grads *g) {
    int threads = (int)a->threads, failed = 0;
    i64 group = a->heads / a->kv_heads, D = a->D, step = MAX(1, GRAD_ROWS / group), rows = step * group;
    UNITS_IN_PARALLEL
    for (i64 unit = 0; unit < a->families * a->kv_heads; unit++) {
        i64 family = unit / a->kv_heads, kv = unit % a->kv_heads;
        i64 blocks = (most_keys(a, family) + KEYS - 1) / KEYS, size = blocks * KEYS * D;
        i64 tile = rows * (3 * D + 2 * KEY_CHUNK * KEYS);
        float *data = scratch_bytes(sizeof(float) * (2 * size + tile) + 2 * sizeof(float *) * blocks);
        if (!data) {
            failed = 1;
            continue;
        }
        const float **pointers = (const float **)(data + 2 * size + tile);
        Blocks keys = {data, pointers, -1, 0}, values = {data + size, pointers + blocks, -1, 0};
        for (i64 i = a->family_start[family]; i < a->family_start[family + 1]; i++) {
            i64 s = a->order[i];
            transpose_segment(&keys, a->k + kv * a->k_h, a->k_n, D, a, s);
            transpose_segment(&values, a->v + kv * a->v_h, a->v_n, D, a, s);
            for (i64 from = 0; from < a->q_len[s]; from += step)
                backward_tile(a, g, &keys, &values, s, kv, from, MIN(step, a->q_len[s] - from), data + 2 * size);
        }
        free(data);
    }
    return failed;
}

/* dsinks [heads]: each row gives minus the sink's share times dout . out, added up in the order of the tokens. */
void whet_sinks_backward(const float *sinks, const Grads *g, float *dsinks, i64 N, i64 heads, i64 D, int threads) {
    ROWS_IN_PARALLEL
    for (i64 h = 0; h < heads; h++) {
        double sum = 0;
        for (i64 n = 0; n < N; n++) {
            i64 row = n * heads + h;
            Lanes dot = lanes(0);
            EACH_VECTOR(i, p, D)
                dot.part[p] = fma_v(load(g->dout + row * D + i), load(g->out + row * D + i), dot.part[p]);
            sum -= (double)(vexp(all(sinks[h] - g->lse[row]))[0] * fold_sum(dot));
        }
        dsinks[h] = (float)sum;
    }
}

/* ---- attention over the pages of the cache: decode steps and prefill ------------------------------------------ */

typedef struct {
    const float *q, *k, *v; /* pages of one layer: k [pages, kv_heads, D, 16], v [pages, kv_heads, 16, D] */
    i64 q_n, q_h;
    i64 heads, kv_heads, D;
    i64 window;
    float scale, cap;
    const float *sinks; /* [heads], or NULL */
    const int32_t *table; /* [rows, table_n] page numbers */
    const i64 *keys; /* [rows] keys that the last query of each row sees */
    const i64 *queries; /* [rows] queries of each row, one after the other in q; NULL: one each */
    i64 rows, table_n, threads;
    float *lse; /* [N, heads], what whet_attend_packed says of each query; or NULL */
} Cached;

typedef struct {
    i64 row, q, count, keys; /* `count` queries from q on; the last one sees `keys` keys, each other one key less */
} CachedTile;

/* Bytes that a tile works in. */
static size_t tile_bytes(const Cached *a, const CachedTile *t) {
    i64 rows = t->count * (a->heads / a->kv_heads), blocks = (t->keys - 1) / KEYS + 1;
    return sizeof(float) * rows * (2 * a->D + blocks * KEYS) + sizeof(float *) * blocks;
}

static void cached_tile(const Cached *a, const CachedTile *t, i64 kv, float *q, float *out) {
    i64 group = a->heads / a->kv_heads, rows = t->count * group, D = a->D, keys = t->keys, page = D * KEYS;
    i64 first = keys - t->count, b0 = first_seen(first, a->window) / KEYS, blocks = (keys - 1) / KEYS + 1 - b0;
    i64 ld = blocks * KEYS;
    float *sum = q + rows * D, *p = sum + rows * D, by[rows];
    const float **block = (const float **)(p + rows * ld);
    const int32_t *pages = a->table + t->row * a->table_n + b0;
    for (i64 b = 0; b < blocks; b++) block[b] = a->k + (pages[b] * a->kv_heads + kv) * page;
    for (i64 r = 0; r < rows; r++)
        scale_row(a->q + (t->q + r / group) * a->q_n + (kv * group + r % group) * a->q_h, q + r * D, a->scale, D);
    scores(q, rows, block, blocks, p, ld, D);
    for (i64 r = 0; r < rows; r++) {
        i64 at = first + r / group;
        float max, total = soft_row(p + r * ld, b0 * KEYS, blocks, first_seen(at, a->window), at, a->cap, &max);
        by[r] = sunk(a->sinks, kv * group + r % group, &total, &max);
        if (a->lse)
            a->lse[(t->q + r / group) * a->heads + kv * group + r % group] = (float)((double)max + log_of(total));
    }
    memset(sum, 0, sizeof(float) * rows * D);
    for (i64 b = 0; b < blocks; b++)
        weigh(sum, D, p + b * KEYS, ld, 1, a->v + (pages[b] * a->kv_heads + kv) * page, D,
              MIN(KEYS, keys - (b0 + b) * KEYS), rows, D);
    for (i64 r = 0; r < rows; r++)
        scale_row(sum + r * D, out + ((t->q + r / group) * a->heads + kv * group + r % group) * D, by[r], D);
}

int whet_attend_cached(const Cached *a, float *out) {
    int threads = (int)a->threads, failed = 0;
    i64 step = MAX(1, QUERY_ROWS / (a->heads / a->kv_heads)), tiles = 0, q = 0;
    for (i64 row = 0; row < a->rows; row++) tiles += a->queries ? (a->queries[row] + step - 1) / step : 1;
    CachedTile *tile = scratch_bytes(sizeof(CachedTile) * MAX(1, tiles)), *next = tile;
    if (!tile) return 1;
    size_t most = 1;
    for (i64 row = 0; row < a->rows; row++) {
        i64 left = a->queries ? a->queries[row] : 1;
        while (left > 0) {
            i64 count = MIN(step, left);
            left -= count;
            *next = (CachedTile){row, q, count, a->keys[row] - left};
            size_t bytes = tile_bytes(a, next++);
            most = MAX(most, bytes);
            q += count;
        }
    }
    _Pragma("omp parallel num_threads(threads) if (threads > 1)")
    {
        float *scratch = scratch_bytes(most);
        if (!scratch) failed = 1;
        _Pragma("omp for schedule(dynamic)") /* kv head outside: rows that share a prompt meet its pages in the cache */
        for (i64 unit = 0; unit < tiles * a->kv_heads; unit++)
            if (scratch) cached_tile(a, tile + unit % tiles, unit / tiles, scratch, out);
        free(scratch);
    }
    free(tile);
    return failed;
}

void whet_write_kv(float *k_pages, float *v_pages, const float *k, i64 k_n, i64 k_h, const float *v, i64 v_n, i64 v_h,
                   const i64 *page, const i64 *slot, i64 N, i64 K, i64 D, int threads) {
    ROWS_IN_PARALLEL
    for (i64 n = 0; n < N; n++)
        for (i64 h = 0; h < K; h++) {
            const float *from = k + n * k_n + h * k_h;
            float *to = k_pages + (page[n] * K + h) * D * KEYS + slot[n];
            for (i64 d = 0; d < D; d++) to[d * KEYS] = from[d];
            memcpy(v_pages + ((page[n] * K + h) * KEYS + slot[n]) * D, v + n * v_n + h * v_h, sizeof(float) * D);
        }
}

/* ---- whole layers over the cache ------------------------------------------------------------------------------- */

int whet_linear(const float *x, i64 x_i, const float *w, i64 w_j, float *y, i64 I, i64 J, i64 K, int half,
                int threads); /* products.c */

typedef struct {
    const float *norm_in, *q, *k, *v, *o, *norm_mid, *gate, *up, *down;
    const float *q_norm, *k_norm, *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias; /* or NULL */
    i64 window;
} Layer;

enum { Q, K, V, SEEN, LSE, O, GATE, UP, DOWN, KINDS }; /* LayerOutput of activations.py */

typedef struct {
    Cached cached; /* its k and v are the first layer's; q, window and lse are set for each layer */
    const Layer *layer;
    i64 layers, layer_pages; /* floats from a layer's pages to the next one's */
    const float *h, *cos, *sin; /* [N, D], [N, head size] */
    const i64 *page, *slot; /* [N], where keys and values go */
    i64 N, D, F; /* tokens, hidden size, size of the gated layer */
    float eps, offset;
    i64 act;
    float *kept[KINDS]; /* where the first layer's products, attention and log-sum-exps stay, dense rows; or NULL */
    i64 kept_layer[KINDS]; /* floats from a layer's to the next one's */
} Layers;

static int project(const float *x, const float *w, const float *bias, float *y, i64 N, i64 J, i64 K, int threads) {
    if (whet_linear(x, K, w, K, y, N, J, K, 0, threads)) return 1;
    for (i64 n = 0; bias && n < N; n++) for (i64 j = 0; j < J; j++) y[n * J + j] += bias[j];
    return 0;
}

/* What `one_layer` of fused_forward.py does, layer after layer: delta [N, D], what the last block adds, and sum [N, D],
   the residual. Returns 0, or 1 where memory ran out. */
int whet_cached_layers(const Layers *a, float *delta, float *sum) {
    Cached c = a->cached;
    int threads = (int)c.threads, keeps = a->kept[Q] != NULL;
    i64 N = a->N, D = a->D, F = a->F, own = c.heads * c.D, shared = c.kv_heads * c.D;
    float *x = scratch_bytes(sizeof(float) * N * (D + MAX(2 * own + 3 * shared, 3 * F)));
    if (!x) return 1;
    float *turned_q = x + N * D, *turned_k = turned_q + N * own, *inner = x + N * D, *rest = turned_k + N * shared;
    float *y[KINDS] = {rest, rest + N * own, rest + N * (own + shared), rest, NULL, delta, inner + N * F, inner + 2 * N * F, delta};
    const float *h = a->h;
    int failed = 0;
    for (i64 i = 0; i < a->layers && !failed; i++) {
        const Layer *l = a->layer + i;
        for (int kind = 0; keeps && kind < KINDS; kind++) y[kind] = a->kept[kind] + i * a->kept_layer[kind];
        const float *before = i && keeps ? y[DOWN] - a->kept_layer[DOWN] : delta;
        if (!i) whet_rms_norm(h, NULL, l->norm_in, x, NULL, N, D, a->eps, a->offset, threads);
        else whet_rms_norm(before, h, l->norm_in, x, sum, N, D, a->eps, a->offset, threads), h = sum;
        failed |= project(x, l->q, l->q_bias, y[Q], N, own, D, threads);
        failed |= project(x, l->k, l->k_bias, y[K], N, shared, D, threads);
        failed |= project(x, l->v, l->v_bias, y[V], N, shared, D, threads);
        whet_norm_rope(y[Q], own, c.D, l->q_norm, a->cos, a->sin, turned_q, N, c.heads, c.D, a->eps, 0, threads);
        whet_norm_rope(y[K], shared, c.D, l->k_norm, a->cos, a->sin, turned_k, N, c.kv_heads, c.D, a->eps, 0, threads);
        whet_write_kv((float *)c.k, (float *)c.v, turned_k, shared, c.D, y[V], shared, c.D, a->page, a->slot, N,
                      c.kv_heads, c.D, threads);
        c.q = turned_q, c.window = l->window, c.lse = y[LSE];
        failed |= whet_attend_cached(&c, y[SEEN]); /* without `keeps` in the place of q, which it has turned */
        c.k += a->layer_pages, c.v += a->layer_pages;
        failed |= project(y[SEEN], l->o, l->o_bias, y[O], N, D, own, threads);
        whet_rms_norm(y[O], h, l->norm_mid, x, sum, N, D, a->eps, a->offset, threads), h = sum;
        failed |= project(x, l->gate, l->gate_bias, y[GATE], N, F, D, threads);
        failed |= project(x, l->up, l->up_bias, y[UP], N, F, D, threads);
        whet_glu(y[GATE], F, y[UP], F, inner, N, F, (int)a->act, 0, threads);
        failed |= project(inner, l->down, l->down_bias, y[DOWN], N, D, F, threads);
    }
    if (keeps && !failed) memcpy(delta, y[DOWN], sizeof(float) * N * D);
    free(x);
    return failed;
}

/* ---- a whole decode step --------------------------------------------------------------------------------------- */

enum { SLOT, LAST, ENDS, CELL, TOKEN, LENGTH, STATES }; /* rows of `LiveRows.state` of runner.py */

typedef struct {
    Layers layers; /* of them h, cos, sin, page, slot, N and the cache's keys, rows and table are set here */
    const float *embed, *norm, *head; /* [V, D], [D], [V, D] */
    const float *cos, *sin; /* [positions, head size] */
    i64 V, positions, pages;
    i64 *state; /* [STATES, rows] */
    const int32_t *table; /* [rows, table_n] */
    i64 rows, table_n;
    const float *heat; /* [rows], what logits are divided by; or NULL: all by `temperature` */
    float temperature;
    const double *uniform; /* by cell, as the next three */
    i64 *token;
    float *logp, *sample_logp;
    const uint8_t *ends; /* end sets */
    i64 *number, first_number; /* [pages, KEYS] which row of the activations a token has, from first_number on, or -1; or NULL */
} Step;

/* Where a row's next token stands. Returns whether all its pages exist. */
static int place(const Step *s, i64 b, i64 *page, i64 *slot) {
    const int32_t *own = s->table + b * s->table_n;
    i64 length = s->state[LENGTH * s->rows + b], last = length / KEYS;
    if (last >= s->table_n || length >= s->positions) return 0;
    for (i64 p = 0; p <= last; p++) if (own[p] < 0 || own[p] >= s->pages) return 0;
    *page = own[last], *slot = length % KEYS;
    return 1;
}

/* What `Runner.step` does for rows for which temperature is all: by the same kernels in the same order, so bits are the
   same. ended[b]: the row ends with this token. Returns the number of rows whose logits allow no sample; -1 where memory
   ran out, -2 where a row has a page, a token or a position that does not exist. Then nothing has moved on. */
i64 whet_decode_step(const Step *s, uint8_t *ended) {
    Layers a = s->layers;
    i64 B = s->rows, D = a.D, H = a.cached.D, V = s->V, *state = s->state, bad = -2;
    int threads = (int)a.cached.threads, fits = 1;
    float *x = scratch_bytes(sizeof(float) * B * (4 * D + 2 * H + V + 1));
    i64 *page = scratch_bytes(sizeof(i64) * B * 4);
    double *uniform = scratch_bytes(sizeof(double) * B);
    if (!x || !page || !uniform) {
        bad = -1;
        goto done;
    }
    float *delta = x + B * D, *sum = delta + B * D, *h = sum + B * D, *cos = h + B * D, *sin = cos + B * H;
    float *logits = sin + B * H, *logp = logits + B * V;
    i64 *slot = page + B, *keys = slot + B, *token = keys + B;
    for (i64 b = 0; b < B; b++) {
        i64 fed = state[TOKEN * B + b], length = state[LENGTH * B + b];
        fits = fits && fed >= 0 && fed < V && place(s, b, page + b, slot + b);
        if (!fits) goto done;
        keys[b] = length + 1, uniform[b] = s->uniform[state[CELL * B + b]];
        memcpy(h + b * D, s->embed + fed * D, sizeof(float) * D);
        memcpy(cos + b * H, s->cos + length * H, sizeof(float) * H);
        memcpy(sin + b * H, s->sin + length * H, sizeof(float) * H);
    }
    a.h = h, a.cos = cos, a.sin = sin, a.page = page, a.slot = slot, a.N = B;
    a.cached.table = s->table, a.cached.table_n = s->table_n, a.cached.keys = keys, a.cached.rows = B;
    bad = -1;
    if (whet_cached_layers(&a, delta, sum)) goto done;
    whet_rms_norm(delta, sum, s->norm, x, sum, B, D, a.eps, a.offset, threads);
    if (whet_linear(x, D, s->head, D, logits, B, V, D, 0, threads)) goto done;
    for (i64 b = 0; b < B; b++) {
        float heat = s->heat ? s->heat[b] : s->temperature;
        for (i64 v = 0; heat != 1 && v < V; v++) logits[b * V + v] /= heat;
    }
    bad = whet_sample(logits, uniform, token, logp, B, V, threads);
    for (i64 b = 0; !bad && b < B; b++) bad += !isfinite(logp[b]);
    for (i64 b = 0; !bad && b < B; b++) {
        i64 cell = state[CELL * B + b]++;
        state[TOKEN * B + b] = s->token[cell] = token[b];
        state[LENGTH * B + b]++;
        s->logp[cell] = s->sample_logp[cell] = logp[b];
        ended[b] = s->ends[state[ENDS * B + b] + token[b]] || cell == state[LAST * B + b];
        if (s->number) s->number[page[b] * KEYS + slot[b]] = s->first_number < 0 ? -1 : s->first_number + b;
    }
done:
    free(x), free(page), free(uniform);
    return bad;
}
