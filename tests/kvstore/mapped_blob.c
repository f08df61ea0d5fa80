/* Reads an uncompressed block through mmap, with nothing but the C library: the format needs no Python.
 * Usage: mapped_blob FILE LAYER KV HEAD TOKEN DIM; prints the shape, then that one element as a float. Reads bfloat16
 * blocks, plain or quantised: int8 and int4 values stand before the float32 scales of their layer's K or V. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct header {
    char magic[4];
    uint8_t version, codec, quantisation, dtype;
    uint8_t tokenizer[8], model[8], arithmetic[8];
    uint16_t layers, heads, head_dim, tokens;
    uint32_t position, stored_bytes;
    uint8_t token_hash[16], key[32], digest[32];
};
_Static_assert(sizeof(struct header) == 128, "no padding");

enum { NONE, INT8, INT4 };

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    int fd = open(argv[1], O_RDONLY);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) || status.st_size < 128) return 3;
    const uint8_t *blob = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (blob == MAP_FAILED) return 4;
    const struct header *h = (const struct header *)blob;
    if (memcmp(h->magic, "KVRB", 4) || h->version != 1 || h->codec || h->quantisation > INT4 || h->dtype != 3) return 5;

    size_t vectors = (size_t)h->heads * h->tokens; /* of one layer's K or V */
    size_t vector_bytes = h->quantisation == NONE ? 2 * h->head_dim : h->quantisation == INT8 ? h->head_dim : h->head_dim / 2;
    size_t scale_bytes = h->quantisation == NONE ? 0 : sizeof(float);
    size_t piece = vectors * (vector_bytes + scale_bytes);
    if (h->stored_bytes != h->layers * 2 * piece || (size_t)status.st_size != 128 + h->layers * 2 * piece) return 6;

    size_t layer = atoi(argv[2]), kv = atoi(argv[3]), head = atoi(argv[4]), token = atoi(argv[5]), dim = atoi(argv[6]);
    if (layer >= h->layers || kv > 1 || head >= h->heads || token >= h->tokens || dim >= h->head_dim) return 7;
    const uint8_t *values = blob + 128 + (layer * 2 + kv) * piece;
    size_t vector = head * h->tokens + token;
    const uint8_t *own = values + vector * vector_bytes;
    float value;
    if (h->quantisation == NONE) {
        uint16_t half;
        memcpy(&half, own + 2 * dim, sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&value, &bits, sizeof value);
    } else {
        float scale;
        memcpy(&scale, values + vectors * vector_bytes + vector * sizeof scale, sizeof scale);
        int whole = h->quantisation == INT8 ? (int8_t)own[dim] : (int8_t)(own[dim / 2] << (dim % 2 ? 0 : 4)) >> 4;
        value = whole * scale;
    }
    printf("%u %u %u %u %u %.9g\n", h->layers, h->heads, h->head_dim, h->tokens, h->position, value);
    return 0;
}
