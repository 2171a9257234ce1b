/* Vectors of the C kernels: generic ones of the compiler, of the width W that the processor has.

   Bits must not depend on that width, nor on what a compiler likes to fuse. So: multiply-adds that are fused are written
   as fma_v (build with -ffp-contract=off), and sums over a row run in 16 lanes, whatever W is, folded in one tree. */

#ifndef WHET_VECTORS_H
#define WHET_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

#if defined(WHET_WIDTH)
#define W WHET_WIDTH /* another one than the processor's: to show that bits do not depend on it */
#elif defined(__AVX512F__)
#define W 16
#elif defined(__AVX__)
#define W 8
#else
#define W 4 /* NEON, SSE */
#endif

#if defined(__SSE__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W)));

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define UNROLL _Pragma("GCC unroll 32")

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf all(float x) { return x - (vf){0}; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf vmax(vf a, vf b) { return pick(a > b, a, b); }

/* bfloat16 is the upper half of a float32; halves to even, and every NaN is one. */
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

INLINE vf widen(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }
INLINE vh narrow(vf x) {
    vu bits = (vu)x, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (vu)(x != x);
    return __builtin_convertvector((up & ~nan) | (nan & 0x7fc0), vh);
}

/* a b + c, rounded once. A processor without fused multiply-add rounds twice: other bits, and the digest says so. */
INLINE vf fma_v(vf a, vf b, vf c) {
#if W == 16 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif W == 16 && defined(__FMA__)
    union { vf whole; __m256 half[2]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return z.whole;
#elif W == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif W == 4 && defined(__FMA__)
    return (vf)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif W == 4 && defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Whole cache lines, so that no vector straddles two. */
static void *scratch_bytes(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

#endif
