/* A referee for the meter's tests: counts every byte a process asks malloc for, on any thread, whoever asks.
 *
 * Preloaded (LD_PRELOAD) it stands before glibc's malloc family. Requested sizes are counted, not rounded ones, so each
 * block of at least FLOOR bytes is kept in a table by its address; smaller ones are not counted. It knows nothing of
 * torch: no tensor, no allocator, no event.
 *
 *     gcc -O2 -shared -fPIC -o referee.so referee.c
 */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define FLOOR 1024
#define NUM_SLOTS ((size_t)1 << 20) /* a power of two, far more than there are live blocks */
#define GONE ((void *)1)            /* a block was here: look on */

static struct {
    void *block;
    size_t nbytes;
} slots[NUM_SLOTS];
static volatile char locked;
static long live, peak;

static void lock(void) {
    while (__atomic_test_and_set(&locked, __ATOMIC_ACQUIRE)) {
    }
}

static void unlock(void) { __atomic_clear(&locked, __ATOMIC_RELEASE); }

static size_t home(void *block) {
    return (size_t)(((uint64_t)(uintptr_t)block >> 4) * 0x9E3779B97F4A7C15u >> 44) & (NUM_SLOTS - 1);
}

static void born(void *block, size_t nbytes) {
    if (!block || nbytes < FLOOR) return;
    lock();
    size_t at = home(block);
    while (slots[at].block && slots[at].block != GONE) at = (at + 1) & (NUM_SLOTS - 1);
    slots[at].block = block;
    slots[at].nbytes = nbytes;
    live += (long)nbytes;
    if (live > peak) peak = live;
    unlock();
}

/* The block's size if it was counted, and 0 if it was not. */
static size_t died(void *block) {
    if (!block) return 0;
    size_t nbytes = 0;
    lock();
    for (size_t at = home(block); slots[at].block; at = (at + 1) & (NUM_SLOTS - 1)) {
        if (slots[at].block != block) continue;
        nbytes = slots[at].nbytes;
        live -= (long)nbytes;
        slots[at].block = GONE;
        /* Before an empty slot nothing needs to be looked past. */
        for (; slots[at].block == GONE && !slots[(at + 1) & (NUM_SLOTS - 1)].block; at = (at - 1) & (NUM_SLOTS - 1))
            slots[at].block = NULL;
        break;
    }
    unlock();
    return nbytes;
}

void *malloc(size_t nbytes) {
    void *block = __libc_malloc(nbytes);
    born(block, nbytes);
    return block;
}

void *calloc(size_t count, size_t each) {
    void *block = __libc_calloc(count, each);
    born(block, count * each);
    return block;
}

void *realloc(void *old, size_t nbytes) {
    size_t before = died(old); /* first, because another thread may be given the address at once */
    void *block = __libc_realloc(old, nbytes);
    if (block || !nbytes)
        born(block, nbytes);
    else
        born(old, before); /* it failed, and the old block stays */
    return block;
}

void free(void *block) {
    died(block);
    __libc_free(block);
}

void *memalign(size_t alignment, size_t nbytes) {
    void *block = __libc_memalign(alignment, nbytes);
    born(block, nbytes);
    return block;
}

void *aligned_alloc(size_t alignment, size_t nbytes) { return memalign(alignment, nbytes); }

int posix_memalign(void **result, size_t alignment, size_t nbytes) {
    if (alignment % sizeof(void *) || alignment & (alignment - 1) || !alignment) return EINVAL;
    void *block = memalign(alignment, nbytes);
    if (!block) return ENOMEM;
    *result = block;
    return 0;
}

long referee_live(void) { return live; }

long referee_peak(void) { return peak; }

void referee_restart(void) {
    lock();
    peak = live;
    unlock();
}
