/* The passes over a push on the host: one read and one write of memory encode a chunk with error
 * feedback, decode its payload, or add it to a sum. psdist/codecs/host_kernels/__init__.py compiles
 * and calls them.
 *
 * The bits are those of the codecs in torch (psdist/codecs/schemes):
 * - compile with -ffp-contract=off and without -ffast-math: every operation rounds by itself;
 * - sums that decide bits are added in the order of psdist.codecs.blocks.sums_of;
 * - magnitudes are compared as whole numbers, where NaN is above infinity;
 * - a weighted sum rounds once where the processor can, as torch's does.
 * Blocks do not depend on one another, and every sum is added in a written order.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define TINY 0x1p-126f
#define LARGEST 0x1.fffffep127f
#define DOWN 0x1p-8f
#define INFINITE 0x7f800000u
/* Added to a value below 2^22 and subtracted again: the nearest whole number, halves to even. */
#define MAGIC 0x1.8p23f

/* A push: coded values are the stretches [start, stop) of the chunk, one after another. */
typedef struct {
    const float *gradient;
    const float *kept; /* the residual, to be multiplied by times; NULL: there is none */
    float times;
    float *left;      /* the new residual */
    uint8_t *payload; /* a float32 scale for each block, then the codes of all blocks */
    const int64_t *stretches;
    int64_t num; /* of coded values */
    float *seen; /* what the payload is decoded to, of the coded values; NULL: nobody asks */
} push_t;

typedef struct {
    double missed, wanted; /* sums of squares of what is left out, and of what was asked for */
    float most_missed, most_given;
} numbers_t;

typedef struct {
    const int64_t *stretch;
    int64_t at;
} cursor_t;

static inline uint32_t raw_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of(float value) { return raw_of(value) & 0x7fffffffu; }

static inline uint32_t larger(uint32_t one, uint32_t other) { return one > other ? one : other; }

/* Both most: the bits of the largest magnitudes of the gradient and of what is asked for. */
static inline void ask_part(const float *restrict gradient, const float *restrict kept, float times,
                            float *restrict asked, int64_t num, uint32_t *most_given,
                            uint32_t *most_asked) {
    uint32_t given = *most_given, most = *most_asked;
    for (int64_t i = 0; i < num; i++) {
        float residual = kept[i] * times;
        asked[i] = gradient[i] + residual;
        given = larger(given, bits_of(gradient[i]));
        most = larger(most, bits_of(asked[i]));
    }
    *most_given = given;
    *most_asked = most;
}

static inline int64_t next_part(cursor_t *cursor, int64_t most, int64_t *at) {
    while (cursor->at == cursor->stretch[1]) {
        cursor->stretch += 2;
        cursor->at = cursor->stretch[0];
    }
    int64_t num = cursor->stretch[1] - cursor->at;
    *at = cursor->at;
    num = num < most ? num : most;
    cursor->at += num;
    return num;
}

static inline void ask(const push_t *push, cursor_t *cursor, float *asked, int64_t num,
                       uint32_t *most_given, uint32_t *most_asked) {
    float nothing[BLOCK]; /* added, it changes no value, and no zero's sign */
    if (!push->kept)
        for (int i = 0; i < BLOCK; i++) nothing[i] = -0.0f;
    if (num < BLOCK) memset(asked, 0, BLOCK * sizeof(float));
    for (int64_t done = 0, at; done < num;) {
        int64_t part = next_part(cursor, num - done, &at);
        const float *gradient = push->gradient + at;
        const float *kept = push->kept ? push->kept + at : nothing;
        if (part == BLOCK) /* the usual case, of a known length */
            ask_part(gradient, kept, push->times, asked, BLOCK, most_given, most_asked);
        else
            ask_part(gradient, kept, push->times, asked + done, part, most_given, most_asked);
        done += part;
    }
}

/* What is left out of one block goes to left. */
static inline void miss_block(const float *restrict asked, const float *restrict seen,
                              float *restrict left, numbers_t *numbers, uint32_t *most_missed) {
    float missed[16] = {0}, wanted[16] = {0};
    uint32_t most = *most_missed;
    for (int i = 0; i < BLOCK; i += 16)
        for (int j = 0; j < 16; j++) {
            float value = asked[i + j], rest = value - seen[i + j];
            left[i + j] = rest;
            missed[j] += rest * rest;
            wanted[j] += value * value;
            most = larger(most, bits_of(rest));
        }
    for (int j = 0; j < 16; j++) {
        numbers->missed += missed[j];
        numbers->wanted += wanted[j];
    }
    *most_missed = most;
}

static inline void miss(const push_t *push, cursor_t *cursor, const float *asked, float *seen,
                        int64_t num, numbers_t *numbers, uint32_t *most_missed) {
    int64_t at, part = next_part(cursor, num, &at);
    if (part == BLOCK) {
        miss_block(asked, seen, push->left + at, numbers, most_missed);
        return;
    }
    float left[BLOCK];
    /* Nothing is left out where there are no values. */
    memcpy(seen + num, asked + num, (size_t)(BLOCK - num) * sizeof(float));
    miss_block(asked, seen, left, numbers, most_missed);
    for (int64_t done = 0;;) {
        memcpy(push->left + at, left + done, (size_t)part * sizeof(float));
        done += part;
        if (done == num) return;
        part = next_part(cursor, num - done, &at);
    }
}

static inline float sum_of(const float *values) {
    float sums[BLOCK / 2];
    for (int i = 0; i < BLOCK / 2; i++) sums[i] = values[i] + values[i + BLOCK / 2];
    for (int width = BLOCK / 4; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) sums[i] = sums[i] + sums[i + width];
    return sums[0];
}

/* The scale of whole multiples; *divisor is 0 if a value is not finite. */
static inline float scale_of(uint32_t most, float levels, float cap, float *divisor) {
    *divisor = 0;
    if (most >= INFINITE) return NAN;
    float scale = float_of(most) / levels;
    if (scale < TINY) scale = 0;
    if (scale > cap) scale = cap;
    *divisor = scale != 0 ? scale : 1.0f;
    return scale;
}

static inline float multiples(const float *restrict asked, float *restrict seen, int8_t *restrict to,
                              uint32_t most, float levels, float cap) {
    float divisor, scale = scale_of(most, levels, cap, &divisor);
    if (divisor == 0) {
        memset(to, 0, BLOCK);
        for (int i = 0; i < BLOCK; i++) seen[i] = NAN;
        return scale;
    }
    for (int i = 0; i < BLOCK; i++) {
        float multiple = asked[i] / divisor;
        multiple = (multiple + MAGIC) - MAGIC;
        to[i] = (int8_t)(int32_t)multiple;
        seen[i] = multiple * scale;
    }
    return scale;
}

static inline float cap_of(double levels) {
    return (float)((double)LARGEST * (1.0 - 0x1p-20) / levels);
}

static inline float int8_block(const float *asked, float *seen, uint8_t *codes, int64_t num,
                               uint32_t most) {
    (void)num;
    return multiples(asked, seen, (int8_t *)codes, most, 127.0f, cap_of(127.0));
}

static inline float int4_block(const float *asked, float *seen, uint8_t *codes, int64_t num,
                               uint32_t most) {
    (void)num;
    int8_t each[BLOCK];
    float scale = multiples(asked, seen, each, most, 7.0f, cap_of(7.0));
    for (int i = 0; i < BLOCK / 2; i++)
        codes[i] = (uint8_t)((each[i] + 8) | ((each[i + BLOCK / 2] + 8) << 4));
    return scale;
}

static inline float int2_block(const float *asked, float *seen, uint8_t *codes, int64_t num,
                               uint32_t most) {
    (void)most;
    float magnitudes[BLOCK], kept[BLOCK], count = (float)num, times = 1;
    int8_t each[BLOCK];
    for (int i = 0; i < BLOCK; i++) magnitudes[i] = fabsf(asked[i]);
    float mean = sum_of(magnitudes) / count;
    if (bits_of(mean) >= INFINITE) { /* a sum that overflows is made of smaller values */
        times = DOWN;
        for (int i = 0; i < BLOCK; i++) magnitudes[i] *= DOWN;
        mean = sum_of(magnitudes) / count;
    }
    float limit = 0.7f * mean, scale = NAN;
    int32_t num_chosen = 0;
    if (bits_of(mean) < INFINITE) {
        for (int i = 0; i < BLOCK; i++) {
            int32_t is_chosen = magnitudes[i] > limit;
            kept[i] = is_chosen ? magnitudes[i] : 0.0f;
            each[i] = (int8_t)(is_chosen ? (asked[i] < 0 ? -1 : 1) : 0);
            num_chosen += is_chosen;
        }
        scale = sum_of(kept) / (float)(num_chosen ? num_chosen : 1);
        float largest = LARGEST * times;
        scale = (scale < largest ? scale : largest) / times;
        if (scale < TINY) scale = 0;
    } else
        memset(each, 0, sizeof each);
    for (int i = 0; i < BLOCK; i++) seen[i] = (float)each[i] * scale;
    for (int i = 0; i < BLOCK / 4; i++)
        codes[i] = (uint8_t)((each[i] + 2) | ((each[i + 64] + 2) << 2) | ((each[i + 128] + 2) << 4) |
                             ((each[i + 192] + 2) << 6));
    return scale;
}

static inline float sign_block(const float *asked, float *seen, uint8_t *codes, int64_t num,
                               uint32_t most) {
    (void)most;
    float magnitudes[BLOCK], count = (float)num;
    for (int i = 0; i < BLOCK; i++) magnitudes[i] = fabsf(asked[i]);
    float scale = sum_of(magnitudes) / count;
    if (bits_of(scale) >= INFINITE) {
        for (int i = 0; i < BLOCK; i++) magnitudes[i] *= DOWN;
        float small = sum_of(magnitudes) / count, largest = LARGEST * DOWN;
        scale = NAN;
        if (bits_of(small) < INFINITE) scale = (small < largest ? small : largest) / DOWN;
    }
    uint32_t bits = raw_of(scale);
    for (int i = 0; i < BLOCK; i++) seen[i] = float_of((raw_of(asked[i]) & 0x80000000u) ^ bits);
    for (int i = 0; i < BLOCK / 8; i++) {
        uint32_t packed = 0; /* the first value has the highest bit */
        for (int j = 0; j < 8; j++) packed |= raw_of(asked[8 * i + j]) >> 31 << (7 - j);
        codes[i] = (uint8_t)packed;
    }
    return scale;
}

/* Values of 16 bits, each by itself. Too large ones become the largest; NaN has one form. */

static inline uint32_t fp16_of(uint32_t bits) {
    uint32_t most = bits & 0x7fffffffu, small, usual;
    if (most < INFINITE && most > 0x477fe000u) most = 0x477fe000u;
    small = raw_of(float_of(most) + 0.5f) - 0x3f000000u; /* below 2^-14: multiples of 2^-24 */
    usual = (most + 0xc8000fffu + (most >> 13 & 1)) >> 13;
    usual = most < 0x38800000u ? small : usual;
    usual = most >= INFINITE ? (most > INFINITE ? 0x7e00u : 0x7c00u) : usual;
    return most > INFINITE ? usual : usual | (bits >> 16 & 0x8000u);
}

static inline float fp16_value(uint32_t code) {
    uint32_t bits = (code & 0x7fffu) << 13, exponent = bits & 0x0f800000u;
    bits += 0x38000000u;
    uint32_t small = raw_of(float_of(bits + 0x00800000u) - 0x1p-14f);
    bits = exponent == 0x0f800000u ? bits + 0x38000000u : bits;
    bits = exponent == 0 ? small : bits;
    return float_of(bits | (code & 0x8000u) << 16);
}

static inline uint32_t bf16_of(uint32_t bits) {
    uint32_t most = bits & 0x7fffffffu;
    if (most < INFINITE && most > 0x7f7f0000u) most = 0x7f7f0000u;
    uint32_t usual = (most + 0x7fffu + (most >> 16 & 1)) >> 16 | (bits >> 16 & 0x8000u);
    return most > INFINITE ? 0x7fc0u : usual;
}

static inline float bf16_value(uint32_t code) { return float_of(code << 16); }

#define CAST(name)                                                                         \
    static inline float name##_block(const float *restrict asked, float *restrict seen,    \
                                     uint8_t *codes, int64_t num, uint32_t most) {         \
        uint16_t each[BLOCK];                                                              \
        (void)most;                                                                        \
        for (int i = 0; i < BLOCK; i++) each[i] = (uint16_t)name##_of(raw_of(asked[i]));   \
        for (int i = 0; i < BLOCK; i++) seen[i] = name##_value(each[i]);                   \
        memcpy(codes, each, 2 * (size_t)num);                                              \
        return 0;                                                                          \
    }                                                                                      \
    static inline int name##_values(const uint8_t *codes, float scale, float *restrict to, \
                                    int64_t num) {                                         \
        uint16_t each[BLOCK];                                                              \
        (void)scale;                                                                       \
        memcpy(each, codes, 2 * (size_t)num);                                              \
        for (int i = 0; i < num; i++) to[i] = name##_value(each[i]);                       \
        return 0;                                                                          \
    }

CAST(fp16)
CAST(bf16)

/* bytes of the codes of a block; scale_bytes of its scale */
#define PUSH(name, bytes, scale_bytes)                                                   \
    void name##_push(const push_t *push, numbers_t *numbers) {                           \
        int64_t num_blocks = (push->num + BLOCK - 1) / BLOCK;                            \
        uint8_t *codes = push->payload + (scale_bytes)*num_blocks;                       \
        cursor_t from = {push->stretches, push->stretches[0]}, to = from;                \
        uint32_t most_missed = 0, most_given = 0;                                        \
        float asked[BLOCK], seen[BLOCK];                                                 \
        numbers->missed = numbers->wanted = 0;                                           \
        for (int64_t block = 0; block < num_blocks; block++) {                           \
            int64_t rest = push->num - block * BLOCK, num = rest < BLOCK ? rest : BLOCK; \
            uint32_t most = 0;                                                           \
            ask(push, &from, asked, num, &most_given, &most);                            \
            float scale = name##_block(asked, seen, codes + block * (bytes), num, most); \
            memcpy(push->payload + 4 * block, &scale, scale_bytes);                      \
            if (push->seen) memcpy(push->seen + block * BLOCK, seen, 4 * (size_t)num);   \
            miss(push, &to, asked, seen, num, numbers, &most_missed);                    \
        }                                                                                \
        numbers->most_missed = float_of(most_missed);                                    \
        numbers->most_given = float_of(most_given);                                      \
    }

PUSH(int8, BLOCK, 4)
PUSH(int4, BLOCK / 2, 4)
PUSH(int2, BLOCK / 4, 4)
PUSH(sign, BLOCK / 8, 4)
PUSH(fp16, BLOCK * 2, 0)
PUSH(bf16, BLOCK * 2, 0)

/* Decoding: each returns true if a code is one that no sender uses. */

static inline int int8_values(const uint8_t *restrict codes, float scale, float *restrict values,
                              int64_t num) {
    (void)num;
    int is_bad = 0;
    for (int i = 0; i < BLOCK; i++) {
        int8_t code = (int8_t)codes[i];
        is_bad |= code == -128;
        values[i] = (float)code * scale;
    }
    return is_bad;
}

static inline int int4_values(const uint8_t *restrict codes, float scale, float *restrict values,
                              int64_t num) {
    (void)num;
    int is_bad = 0;
    for (int i = 0; i < BLOCK / 2; i++) {
        int low = codes[i] & 15, high = codes[i] >> 4;
        is_bad |= (low == 0) | (high == 0);
        values[i] = (float)(low - 8) * scale;
        values[i + BLOCK / 2] = (float)(high - 8) * scale;
    }
    return is_bad;
}

static inline int int2_values(const uint8_t *restrict codes, float scale, float *restrict values,
                              int64_t num) {
    (void)num;
    int is_bad = 0;
    for (int place = 0; place < 4; place++)
        for (int i = 0; i < BLOCK / 4; i++) {
            int code = codes[i] >> (2 * place) & 3;
            is_bad |= code == 0;
            values[place * (BLOCK / 4) + i] = (float)(code - 2) * scale;
        }
    return is_bad;
}

static inline int sign_values(const uint8_t *restrict codes, float scale, float *restrict values,
                              int64_t num) {
    (void)num;
    uint32_t bits = raw_of(scale);
    for (int i = 0; i < BLOCK / 8; i++) {
        uint32_t packed = (uint32_t)codes[i] << 24;
        for (int j = 0; j < 8; j++)
            values[8 * i + j] = float_of(bits ^ (packed << j & 0x80000000u));
    }
    return 0;
}

static inline void add(float *restrict into, const float *restrict values, float weight,
                       int64_t num) {
    for (int64_t i = 0; i < num; i++)
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
        into[i] = fmaf(values[i], weight, into[i]);
#else
        into[i] += values[i] * weight;
#endif
}

/* Both return 0, or 1 at the first block that no sender makes. Values outside the stretches stay.
 * name_add adds the values times weight to into. */
#define DECODE(name, bytes, scale_bytes)                                                   \
    static inline int name##_pass(const uint8_t *payload, const int64_t *stretches,        \
                                  int64_t total, float *into, int adds, float weight) {    \
        int64_t num_blocks = (total + BLOCK - 1) / BLOCK;                                  \
        const uint8_t *codes = payload + (scale_bytes)*num_blocks;                         \
        cursor_t to = {stretches, stretches[0]};                                           \
        for (int64_t block = 0; block < num_blocks; block++, codes += (bytes)) {           \
            int64_t rest = total - block * BLOCK, num = rest < BLOCK ? rest : BLOCK, at;   \
            float scale = 0, values[BLOCK];                                                \
            memcpy(&scale, payload + 4 * block, scale_bytes);                              \
            if (scale < 0) return 1;                                                       \
            int64_t part = next_part(&to, num, &at);                                       \
            if (part == BLOCK && !adds) {                                                  \
                if (name##_values(codes, scale, into + at, BLOCK)) return 1;               \
                continue;                                                                  \
            }                                                                              \
            if (name##_values(codes, scale, values, num)) return 1;                        \
            for (int64_t done = 0;;) {                                                     \
                if (adds)                                                                  \
                    add(into + at, values + done, weight, part == BLOCK ? BLOCK : part);   \
                else                                                                       \
                    memcpy(into + at, values + done, (size_t)part * sizeof(float));        \
                done += part;                                                              \
                if (done == num) break;                                                    \
                part = next_part(&to, num - done, &at);                                    \
            }                                                                              \
        }                                                                                  \
        return 0;                                                                          \
    }                                                                                      \
    int name##_decode(const uint8_t *payload, const int64_t *stretches, int64_t total,     \
                      float *into) {                                                       \
        return name##_pass(payload, stretches, total, into, 0, 1);                         \
    }                                                                                      \
    int name##_add(const uint8_t *payload, const int64_t *stretches, int64_t total,        \
                   float *into, float weight) {                                            \
        return name##_pass(payload, stretches, total, into, 1, weight);                    \
    }

DECODE(int8, BLOCK, 4)
DECODE(int4, BLOCK / 2, 4)
DECODE(int2, BLOCK / 4, 4)
DECODE(sign, BLOCK / 8, 4)
DECODE(fp16, BLOCK * 2, 0)
DECODE(bf16, BLOCK * 2, 0)
