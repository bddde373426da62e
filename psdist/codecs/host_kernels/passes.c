/* The passes over a push on the host: one read and one write of memory encode a chunk with error
 * feedback, or decode its payload. psdist/codecs/host_kernels/__init__.py compiles and calls them.
 *
 * The bits are those of the codecs in torch (psdist/codecs/schemes):
 * - compile with -ffp-contract=off and without -ffast-math: every operation rounds by itself;
 * - sums that decide bits are added in the order of psdist.codecs.blocks.sums_of;
 * - magnitudes are compared as whole numbers, where NaN is above infinity.
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
    const float *kept; /* the residual, to be multiplied by times */
    float times;
    float *left;      /* the new residual */
    uint8_t *payload; /* a float32 scale for each block, then the codes of all blocks */
    const int64_t *stretches;
    int64_t num; /* of coded values */
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
    if (num < BLOCK) memset(asked, 0, BLOCK * sizeof(float));
    for (int64_t done = 0, at; done < num;) {
        int64_t part = next_part(cursor, num - done, &at);
        const float *gradient = push->gradient + at, *kept = push->kept + at;
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

#define PUSH(name, bytes)                                                                \
    void name##_push(const push_t *push, numbers_t *numbers) {                           \
        int64_t num_blocks = (push->num + BLOCK - 1) / BLOCK;                            \
        uint8_t *codes = push->payload + 4 * num_blocks;                                 \
        cursor_t from = {push->stretches, push->stretches[0]}, to = from;                \
        uint32_t most_missed = 0, most_given = 0;                                        \
        float asked[BLOCK], seen[BLOCK];                                                 \
        numbers->missed = numbers->wanted = 0;                                           \
        for (int64_t block = 0; block < num_blocks; block++) {                           \
            int64_t rest = push->num - block * BLOCK, num = rest < BLOCK ? rest : BLOCK; \
            uint32_t most = 0;                                                           \
            ask(push, &from, asked, num, &most_given, &most);                            \
            float scale = name##_block(asked, seen, codes + block * (bytes), num, most); \
            memcpy(push->payload + 4 * block, &scale, 4);                                \
            miss(push, &to, asked, seen, num, numbers, &most_missed);                    \
        }                                                                                \
        numbers->most_missed = float_of(most_missed);                                    \
        numbers->most_given = float_of(most_given);                                      \
    }

PUSH(int8, BLOCK)
PUSH(int4, BLOCK / 2)
PUSH(int2, BLOCK / 4)
PUSH(sign, BLOCK / 8)

/* Decoding: each returns true if a code is one that no sender uses. */

static inline int int8_values(const uint8_t *restrict codes, float scale, float *restrict values) {
    int is_bad = 0;
    for (int i = 0; i < BLOCK; i++) {
        int8_t code = (int8_t)codes[i];
        is_bad |= code == -128;
        values[i] = (float)code * scale;
    }
    return is_bad;
}

static inline int int4_values(const uint8_t *restrict codes, float scale, float *restrict values) {
    int is_bad = 0;
    for (int i = 0; i < BLOCK / 2; i++) {
        int low = codes[i] & 15, high = codes[i] >> 4;
        is_bad |= (low == 0) | (high == 0);
        values[i] = (float)(low - 8) * scale;
        values[i + BLOCK / 2] = (float)(high - 8) * scale;
    }
    return is_bad;
}

static inline int int2_values(const uint8_t *restrict codes, float scale, float *restrict values) {
    int is_bad = 0;
    for (int place = 0; place < 4; place++)
        for (int i = 0; i < BLOCK / 4; i++) {
            int code = codes[i] >> (2 * place) & 3;
            is_bad |= code == 0;
            values[place * (BLOCK / 4) + i] = (float)(code - 2) * scale;
        }
    return is_bad;
}

static inline int sign_values(const uint8_t *restrict codes, float scale, float *restrict values) {
    uint32_t bits = raw_of(scale);
    for (int i = 0; i < BLOCK / 8; i++) {
        uint32_t packed = (uint32_t)codes[i] << 24;
        for (int j = 0; j < 8; j++)
            values[8 * i + j] = float_of(bits ^ (packed << j & 0x80000000u));
    }
    return 0;
}

/* Returns 0, or 1 if no sender makes such a payload. Values outside the stretches stay. */
#define DECODE(name, bytes)                                                                \
    int name##_decode(const uint8_t *payload, const int64_t *stretches, int64_t total,     \
                      float *into) {                                                       \
        int64_t num_blocks = (total + BLOCK - 1) / BLOCK;                                  \
        const uint8_t *codes = payload + 4 * num_blocks;                                   \
        cursor_t to = {stretches, stretches[0]};                                           \
        for (int64_t block = 0; block < num_blocks; block++) {                             \
            int64_t rest = total - block * BLOCK, num = rest < BLOCK ? rest : BLOCK, at;   \
            float scale, values[BLOCK];                                                    \
            memcpy(&scale, payload + 4 * block, 4);                                        \
            if (scale < 0) return 1;                                                       \
            int64_t part = next_part(&to, num, &at);                                       \
            if (part == BLOCK) {                                                           \
                if (name##_values(codes + block * (bytes), scale, into + at)) return 1;    \
                continue;                                                                  \
            }                                                                              \
            if (name##_values(codes + block * (bytes), scale, values)) return 1;           \
            for (int64_t done = 0;;) {                                                     \
                memcpy(into + at, values + done, (size_t)part * sizeof(float));            \
                done += part;                                                              \
                if (done == num) break;                                                    \
                part = next_part(&to, num - done, &at);                                    \
            }                                                                              \
        }                                                                                  \
        return 0;                                                                          \
    }

DECODE(int8, BLOCK)
DECODE(int4, BLOCK / 2)
DECODE(int2, BLOCK / 4)
DECODE(sign, BLOCK / 8)
