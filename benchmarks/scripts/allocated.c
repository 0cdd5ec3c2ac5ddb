/* Count the bytes that torch's CPU allocator holds: now, and at most since the last mark.
 *
 * torch takes the memory of CPU tensors by posix_memalign, called from libc10.so, and gives it back
 * by free. This library comes before libc (LD_PRELOAD) and keeps the size of each such block. Blocks
 * from before allocated_begin are not counted, nor are those of other libraries.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define CHAINS (1u << 18)
#define BLOCKS (1u << 22)

struct block {
    uintptr_t address;
    int64_t size;
    uint32_t next;
};

static int (*libc_posix_memalign)(void **, size_t, size_t);
static void (*libc_free)(void *);

static uintptr_t code_begin, code_end; /* of libc10.so */
static struct block *blocks;           /* number 0 is none */
static uint32_t *chains;
static uint32_t unused, made;
static int64_t held, most;
static volatile int busy;

static void enter(void) {
    while (__sync_lock_test_and_set(&busy, 1))
        ;
}

static void leave(void) { __sync_lock_release(&busy); }

static uint32_t *chain_of(uintptr_t address) {
    return &chains[(uint32_t)((address >> 6) * 0x9E3779B97F4A7C15ull >> 40) & (CHAINS - 1)];
}

static int find_code(struct dl_phdr_info *library, size_t size, void *data) {
    (void)size, (void)data;
    if (!library->dlpi_name || !strstr(library->dlpi_name, "libc10.so"))
        return 0;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && part->p_flags & PF_X) {
            code_begin = library->dlpi_addr + part->p_vaddr;
            code_end = code_begin + part->p_memsz;
        }
    }
    return 1;
}

static void *pages(size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

/* Count from here on; 0 where torch's library is not loaded or no memory is left. */
int allocated_begin(void) {
    dl_iterate_phdr(find_code, NULL);
    if (!code_begin)
        return 0;
    struct block *all = pages(BLOCKS * sizeof *all);
    uint32_t *heads = pages(CHAINS * sizeof *heads);
    if (!all || !heads)
        return 0;
    made = 1;
    blocks = all;
    __sync_synchronize();
    chains = heads;
    return 1;
}

int64_t allocated_now(void) { return held; }

int64_t allocated_most(void) { return most; }

void allocated_mark(void) {
    enter();
    most = held;
    leave();
}

static void came(uintptr_t address, int64_t size) {
    enter();
    uint32_t number = unused;
    if (number)
        unused = blocks[number].next;
    else if (made < BLOCKS)
        number = made++;
    if (number) {
        uint32_t *chain = chain_of(address);
        blocks[number] = (struct block){address, size, *chain};
        *chain = number;
        held += size;
        if (held > most)
            most = held;
    }
    leave();
}

static void goes(uintptr_t address) {
    enter();
    for (uint32_t *link = chain_of(address); *link; link = &blocks[*link].next) {
        uint32_t number = *link;
        if (blocks[number].address == address) {
            *link = blocks[number].next;
            blocks[number].next = unused;
            unused = number;
            held -= blocks[number].size;
            break;
        }
    }
    leave();
}

int posix_memalign(void **address, size_t alignment, size_t size) {
    if (!libc_posix_memalign)
        libc_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    int failed = libc_posix_memalign(address, alignment, size);
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    if (!failed && chains && code_begin <= caller && caller < code_end)
        came((uintptr_t)*address, (int64_t)size);
    return failed;
}

void free(void *address) {
    if (!libc_free)
        libc_free = dlsym(RTLD_NEXT, "free");
    if (address && chains && !((uintptr_t)address & 63))
        goes((uintptr_t)address);
    libc_free(address);
}
