/* The passes over the rows of a table: finding, adding, reading, summing and updating them.
 * psdist/tables/kernels/__init__.py compiles and calls them; reference.py has the same arithmetic in
 * numpy, with the same bits:
 * - compile with -ffp-contract=off and without -ffast-math: every operation rounds by itself;
 * - a sum over a row is added in 8 lanes, which are then added in halves.
 *
 * A record is a row's id (1 or 2 words), its values, and its state, all words of 4 bytes. An entry of
 * the index is the low byte of the id's hash, then the slot of its record; a negative slot: free.
 * Entries with one hash follow one another (open addressing, linear probing). Records and entries
 * are far apart in memory, so each pass asks for them some rows ahead.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define GOLDEN 0x9e3779b97f4a7c15u
#define ENTRY 5
#define BLOCK 64
#define AHEAD 12

typedef struct {
    float *records;
    uint8_t *index;
    int64_t capacity; /* entries */
    int64_t stride;   /* words of a record */
    int64_t key_words, dim;
    uint64_t first; /* seeds the hashes of ids */
    float step;     /* first values are odd numbers below 2^24 times it */
    float fill;     /* state of a new row */
} memory_t;

typedef struct {
    const int64_t *ids;
    const float *rows;
    int64_t num;
    float weight;
} contribution_t;

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline float *record_of(const memory_t *memory, int32_t slot) {
    return memory->records + slot * memory->stride;
}

static inline int64_t key_of(const memory_t *memory, int32_t slot) {
    const float *record = record_of(memory, slot);
    if (memory->key_words == 1) {
        int32_t key;
        memcpy(&key, record, 4);
        return key;
    }
    int64_t key;
    memcpy(&key, record, 8);
    return key;
}

static inline int32_t slot_at(const memory_t *memory, int64_t at) {
    int32_t slot;
    memcpy(&slot, memory->index + ENTRY * at + 1, 4);
    return slot;
}

static inline int64_t home_of(const memory_t *memory, uint64_t hash) {
    return (int64_t)(((hash >> 32) * (uint64_t)memory->capacity) >> 32);
}

static inline int64_t after(const memory_t *memory, int64_t at) {
    return at + 1 == memory->capacity ? 0 : at + 1;
}

static inline void ask_for(const memory_t *memory, int32_t slot) {
    const char *record = (const char *)record_of(memory, slot);
    for (int64_t at = 0; at < 4 * memory->stride; at += 64)
        __builtin_prefetch(record + at, 1);
    __builtin_prefetch(record + 4 * memory->stride - 1, 1);
}

/* slots: of each id, negative where it has no row. */
void rows_find(const memory_t *memory, const int64_t *ids, int64_t num, int32_t *slots) {
    uint64_t hashes[BLOCK];
    for (int64_t done = 0; done < num; done += BLOCK) {
        int64_t size = num - done < BLOCK ? num - done : BLOCK;
        for (int64_t i = 0; i < size; i++) {
            hashes[i] = mix((uint64_t)ids[done + i] ^ memory->first);
            __builtin_prefetch(memory->index + ENTRY * home_of(memory, hashes[i]));
        }
        for (int64_t i = 0; i < size; i++) {
            int32_t slot = slot_at(memory, home_of(memory, hashes[i]));
            if (slot >= 0) ask_for(memory, slot);
        }
        for (int64_t i = 0; i < size; i++) {
            int64_t at = home_of(memory, hashes[i]);
            int32_t slot;
            while ((slot = slot_at(memory, at)) >= 0) {
                int is_alike = memory->index[ENTRY * at] == (uint8_t)hashes[i];
                if (is_alike && key_of(memory, slot) == ids[done + i]) break;
                at = after(memory, at);
            }
            slots[done + i] = slot;
        }
    }
}

static void enter(memory_t *memory, uint64_t hash, int32_t slot) {
    int64_t at = home_of(memory, hash);
    while (slot_at(memory, at) >= 0) at = after(memory, at);
    memory->index[ENTRY * at] = (uint8_t)hash;
    memcpy(memory->index + ENTRY * at + 1, &slot, 4);
}

/* Fill an empty index with the live ones of the first num records. */
void rows_reindex(memory_t *memory, int64_t num, const uint8_t *is_live) {
    uint64_t hashes[BLOCK];
    int32_t slots[BLOCK];
    for (int64_t done = 0; done < num;) {
        int64_t size = 0;
        for (; size < BLOCK && done < num; done++) {
            if (!is_live[done]) continue;
            hashes[size] = mix((uint64_t)key_of(memory, (int32_t)done) ^ memory->first);
            __builtin_prefetch(memory->index + ENTRY * home_of(memory, hashes[size]), 1);
            slots[size++] = (int32_t)done;
        }
        for (int64_t i = 0; i < size; i++) enter(memory, hashes[i], slots[i]);
    }
}

static inline void first_values(const memory_t *memory, uint64_t hash, float *restrict into) {
    for (int64_t i = 0; i < memory->dim; i++) {
        int32_t number = (int32_t)(mix(hash + (uint64_t)(i + 1) * GOLDEN) >> 40);
        into[i] = (float)(2 * number + 1 - (1 << 24)) * memory->step;
    }
}

/* Write new rows, none of which is there, to free slots. */
void rows_add(memory_t *memory, const int64_t *ids, const int32_t *slots, int64_t num) {
    for (int64_t row = 0; row < num; row++) {
        if (row + AHEAD < num) {
            uint64_t hash = mix((uint64_t)ids[row + AHEAD] ^ memory->first);
            __builtin_prefetch(memory->index + ENTRY * home_of(memory, hash), 1);
        }
        uint64_t hash = mix((uint64_t)ids[row] ^ memory->first);
        float *record = record_of(memory, slots[row]);
        memcpy(record, &ids[row], 4 * memory->key_words); /* its low word first */
        first_values(memory, hash, record + memory->key_words);
        for (int64_t i = memory->key_words + memory->dim; i < memory->stride; i++)
            record[i] = memory->fill;
        enter(memory, hash, slots[row]);
    }
}

/* into: the values of each id; those of a negative slot are its first values. */
void rows_gather(const memory_t *memory, const int64_t *ids, const int32_t *slots, int64_t num,
                 float *restrict into) {
    int64_t dim = memory->dim;
    for (int64_t row = 0; row < num; row++) {
        if (row + AHEAD < num && slots[row + AHEAD] >= 0) ask_for(memory, slots[row + AHEAD]);
        if (slots[row] >= 0)
            memcpy(into + row * dim, record_of(memory, slots[row]) + memory->key_words, 4 * dim);
        else
            first_values(memory, mix((uint64_t)ids[row] ^ memory->first), into + row * dim);
    }
}

static inline void add_to(float *restrict total, const float *restrict row, float weight,
                          int64_t dim) {
    for (int64_t i = 0; i < dim; i++) total[i] += row[i] * weight;
}

/* Sum contributions, each with ascending ids, in their order. Return the number of rows. at: num
 * numbers for its own use. */
int64_t rows_merge(const contribution_t *given, int64_t num, int64_t dim, int64_t *at,
                   int64_t *ids, float *rows) {
    int64_t found = 0;
    memset(at, 0, 8 * num);
    for (;; found++) {
        int64_t least = INT64_MAX, is_left = 0;
        for (int64_t i = 0; i < num; i++) {
            if (at[i] == given[i].num) continue;
            is_left = 1;
            if (given[i].ids[at[i]] < least) least = given[i].ids[at[i]];
        }
        if (!is_left) return found;
        float *total = rows + found * dim;
        memset(total, 0, 4 * dim);
        for (int64_t i = 0; i < num; i++)
            if (at[i] < given[i].num && given[i].ids[at[i]] == least)
                add_to(total, given[i].rows + dim * at[i]++, given[i].weight, dim);
        ids[found] = least;
    }
}

/* Write the distinct ids, ascending, and by id its place among them. Return their number. work: 4 *
 * num numbers for its own use. Sorts by the bytes in which ids differ, the lowest first. */
int64_t rows_distinct(const int64_t *ids, int64_t num, uint64_t *work, int64_t *distinct,
                      int64_t *at) {
    uint64_t *keys = work, *places = work + num, *keys_to = work + 2 * num, *places_to = keys_to + num;
    uint64_t differing = 0;
    for (int64_t i = 0; i < num; i++) {
        keys[i] = (uint64_t)ids[i] ^ (1ull << 63);
        places[i] = i;
        differing |= keys[i] ^ keys[0];
    }
    for (int shift = 0; shift < 64; shift += 8) {
        if (!(differing >> shift & 255)) continue;
        int64_t ends[256] = {0};
        for (int64_t i = 0; i < num; i++) ends[keys[i] >> shift & 255]++;
        for (int64_t i = 0, end = 0; i < 256; i++) {
            int64_t count = ends[i];
            ends[i] = end;
            end += count;
        }
        for (int64_t i = 0; i < num; i++) {
            int64_t to = ends[keys[i] >> shift & 255]++;
            keys_to[to] = keys[i];
            places_to[to] = places[i];
        }
        uint64_t *keys_were = keys, *places_were = places;
        keys = keys_to, places = places_to, keys_to = keys_were, places_to = places_were;
    }
    int64_t found = 0;
    for (int64_t i = 0; i < num; i++) {
        if (!i || keys[i] != keys[i - 1]) distinct[found++] = keys[i] ^ (1ull << 63);
        at[places[i]] = found - 1;
    }
    return found;
}

/* Add each row to the sum at its place, in their order. stride: words from a row to the next. sums:
 * zeros. */
void rows_sum_at(const float *rows, int64_t stride, const int64_t *at, int64_t num, int64_t dim,
                 float *sums) {
    for (int64_t i = 0; i < num; i++) add_to(sums + dim * at[i], rows + stride * i, 1.0f, dim);
}

static inline uint8_t *cells_of(uint8_t *cells, uint64_t hash, int64_t bucket, int depth) {
    return cells + (4 * bucket + depth) * 256 + ((mix(hash) >> (8 * depth)) & 255);
}

/* Count an occurrence of each id in 4 cells of its bucket (4 x 256): a count is one more than the
 * least cell was before this call, and no cell is less. is_seen: zeros, by bucket. */
void rows_count(uint8_t *cells, const uint64_t *hashes, const int64_t *buckets, int64_t num,
                uint8_t *is_seen, uint8_t *counts) {
    for (int64_t i = 0; i < num; i++) {
        if (i + AHEAD < num)
            for (int depth = 0; depth < 4; depth++)
                __builtin_prefetch(cells_of(cells, hashes[i + AHEAD], buckets[i + AHEAD], depth));
        uint8_t least = 255;
        for (int depth = 0; depth < 4; depth++) {
            uint8_t cell = *cells_of(cells, hashes[i], buckets[i], depth);
            least = cell < least ? cell : least;
        }
        counts[i] = least < 255 ? least + 1 : 255;
    }
    for (int64_t i = 0; i < num; i++)
        for (int depth = 0; depth < 4; depth++) {
            uint8_t *cell = cells_of(cells, hashes[i], buckets[i], depth);
            *cell = *cell < counts[i] ? counts[i] : *cell;
        }
    for (int64_t i = 0; i < num; i++) {
        if (is_seen[buckets[i]]) continue;
        is_seen[buckets[i]] = 1;
        uint8_t *bucket = cells + 1024 * buckets[i];
        int used = 0;
        for (int j = 0; j < 256; j++) used += bucket[j] != 0;
        if (2 * used > 256)
            for (int j = 0; j < 1024; j++) bucket[j] >>= 1;
    }
}

static inline float mean_square(const float *restrict row, int64_t dim) {
    float lanes[8] = {0};
    int64_t at = 0;
    for (; at + 8 <= dim; at += 8)
        for (int i = 0; i < 8; i++) lanes[i] += row[at + i] * row[at + i];
    for (int i = 0; at + i < dim; i++) lanes[i] += row[at + i] * row[at + i];
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0] / (float)dim;
}

/* The optimizers: psdist/tables/optimizers.py has the formulas. numbers: the learning rate, then the
 * optimizer's own; sizes: by step, from the first: what the learning rate is multiplied by. */
#define UPDATE(name)                                                                           \
    static inline void name(float *restrict values, float *restrict state,                     \
                            const float *restrict gradient, int64_t dim, const double *numbers, \
                            const double *sizes, int64_t num_sizes)
#define UNUSED (void)state, (void)sizes, (void)num_sizes

UPDATE(sgd) {
    UNUSED;
    float lr = (float)numbers[0];
    for (int64_t i = 0; i < dim; i++) values[i] -= lr * gradient[i];
}

UPDATE(row_wise_adagrad) {
    UNUSED;
    state[0] += mean_square(gradient, dim);
    float size = (float)numbers[0] / (sqrtf(state[0]) + (float)numbers[1]);
    for (int64_t i = 0; i < dim; i++) values[i] -= size * gradient[i];
}

UPDATE(adagrad) {
    UNUSED;
    float lr = (float)numbers[0], eps = (float)numbers[1];
    for (int64_t i = 0; i < dim; i++) {
        state[i] += gradient[i] * gradient[i];
        values[i] -= lr * gradient[i] / (sqrtf(state[i]) + eps);
    }
}

static inline float size_of_step(float *state, const double *numbers, const double *sizes,
                                 int64_t num_sizes) {
    state[0] += 1.0f; /* at 2^24 it stays, where sizes have long been the last one */
    int64_t step = (int64_t)state[0];
    return (float)(numbers[0] * sizes[(step < num_sizes ? step : num_sizes) - 1]);
}

UPDATE(adam) {
    float size = size_of_step(state, numbers, sizes, num_sizes);
    float eps = (float)numbers[1], new_1 = (float)numbers[2], new_2 = (float)numbers[3];
    float *restrict first = state + 1, *restrict second = state + 1 + dim;
    for (int64_t i = 0; i < dim; i++) {
        first[i] += (gradient[i] - first[i]) * new_1;
        second[i] += (gradient[i] * gradient[i] - second[i]) * new_2;
        values[i] -= size * (first[i] / (sqrtf(second[i]) + eps));
    }
}

UPDATE(row_wise_adam) {
    float size = size_of_step(state, numbers, sizes, num_sizes);
    float new_1 = (float)numbers[2], new_2 = (float)numbers[3];
    float *restrict first = state + 2;
    state[1] += (mean_square(gradient, dim) - state[1]) * new_2;
    float divisor = sqrtf(state[1]) + (float)numbers[1];
    for (int64_t i = 0; i < dim; i++) {
        first[i] += (gradient[i] - first[i]) * new_1;
        values[i] -= size * (first[i] / divisor);
    }
}

UPDATE(ftrl) {
    (void)sizes, (void)num_sizes;
    float lr = (float)numbers[0], beta = (float)numbers[1];
    float l1 = (float)numbers[2], l2 = (float)numbers[3];
    float *restrict sums = state, *restrict squares = state + dim;
    float begin = beta / lr + l2;
    for (int64_t i = 0; i < dim; i++) {
        float value = values[i], before = squares[i];
        float now = before + gradient[i] * gradient[i];
        float start = value * begin + (value == 0.0f ? 0.0f : copysignf(l1, value));
        float sum = before == 0.0f ? -start : sums[i];
        float root = sqrtf(now), sigma = (root - sqrtf(before)) / lr;
        sum += gradient[i] - sigma * value;
        float over = fabsf(sum) - l1;
        float moved = copysignf(over < 0.0f ? 0.0f : over, -sum) / ((beta + root) / lr + l2);
        values[i] = now == 0.0f ? value : moved;
        sums[i] = now == 0.0f ? sums[i] : sum;
        squares[i] = now;
    }
}

/* Each rule is compiled for the most frequent lengths of rows, and for any. */
#define PASS(rule, dim)                                                                           \
    for (int64_t row = 0; row < num; row++) {                                                     \
        if (row + AHEAD < num) ask_for(memory, slots[row + AHEAD]);                               \
        float *values = record_of(memory, slots[row]) + memory->key_words;                        \
        rule(values, values + (dim), gradients + row * (dim), (dim), numbers, sizes, num_sizes);  \
    }
#define RULE(rule)                                                                                \
    void rows_##rule(const memory_t *memory, const int32_t *slots, int64_t num,                   \
                     const float *gradients, const double *numbers, const double *sizes,          \
                     int64_t num_sizes) {                                                         \
        switch (memory->dim) {                                                                    \
        case 16: PASS(rule, 16) break;                                                            \
        case 32: PASS(rule, 32) break;                                                            \
        case 64: PASS(rule, 64) break;                                                            \
        default: PASS(rule, memory->dim)                                                          \
        }                                                                                         \
    }
RULE(sgd)
RULE(row_wise_adagrad)
RULE(adagrad)
RULE(adam)
RULE(row_wise_adam)
RULE(ftrl)
