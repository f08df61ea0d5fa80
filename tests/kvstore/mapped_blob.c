/* Reads an uncompressed block through mmap, with nothing but the C library: the format needs no Python.
 * Usage: mapped_blob FILE LAYER KV HEAD TOKEN DIM; prints the shape, then that one bfloat16 element as a float. */
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

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    int fd = open(argv[1], O_RDONLY);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) || status.st_size < 128) return 3;
    const uint8_t *blob = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (blob == MAP_FAILED) return 4;
    const struct header *h = (const struct header *)blob;
    if (memcmp(h->magic, "KVRB", 4) || h->version != 1 || h->codec || h->quantisation || h->dtype != 3) return 5;
    size_t elements = (size_t)h->layers * 2 * h->heads * h->tokens * h->head_dim;
    if (h->stored_bytes != 2 * elements || (size_t)status.st_size != 128 + 2 * elements) return 6;
    size_t layer = atoi(argv[2]), kv = atoi(argv[3]), head = atoi(argv[4]), token = atoi(argv[5]), dim = atoi(argv[6]);
    size_t index = (((layer * 2 + kv) * h->heads + head) * h->tokens + token) * h->head_dim + dim;
    if (index >= elements) return 7;
    uint32_t bits = (uint32_t)((const uint16_t *)(blob + 128))[index] << 16;
    float value;
    memcpy(&value, &bits, 4);
    printf("%u %u %u %u %u %.9g\n", h->layers, h->heads, h->head_dim, h->tokens, h->position, value);
    return 0;
}
