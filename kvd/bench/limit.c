/*
 * How fast this machine moves the bench's pieces without kvd: the yardstick of `kvd bench`.
 *
 *   limit shm SRC_FDS DST_FDS LAYERS SRC_BLOCKS DST_BLOCKS PIECE THREADS
 *   limit tcp SRC_FDS DST_FDS LAYERS SRC_BLOCKS DST_BLOCKS PIECE CONGESTION
 *
 * SRC_FDS and DST_FDS are comma-separated inherited memfds: one for each layer, or one for all of
 * them. Layer l's block b is PIECE bytes at (l * BLOCKS + b) * PIECE. The source holds the bench's
 * oracle words already. An empty CONGESTION takes the system's default.
 *
 * Commands come on stdin: a line "run N", then N source and N destination block ids (u32, native
 * order). Each is answered by one line of JSON: for each method the seconds on the clock and the
 * CPU seconds of this process. The destination is wiped before, and every byte of it is checked
 * after, each method, both outside the timed part. Wrong bytes end the program with status 1.
 *
 * All pages are mapped and touched before the first run, and threads and sockets exist by then.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define MAX_THREADS 64
#define IOVECS 64
#define WIPED 0xFF

typedef void (*copy_fn)(char *dst, const char *src, size_t n);

static char *src_base, *dst_base;
static size_t layers, src_blocks, dst_blocks, piece;
static uint32_t *src_ids, *dst_ids;
static unsigned char *wanted; /* wanted[b]: destination block b is part of this run */
static uint32_t *origin;      /* origin[b]: the source block whose bytes belong there */
static size_t count;

static _Noreturn void fail(const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("{\"ok\": false, \"error\": \"%s\"}\n", text);
    fflush(stdout);
    exit(1);
}

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static char *src_at(size_t layer, size_t block)
{
    return src_base + (layer * src_blocks + block) * piece;
}

static char *dst_at(size_t layer, size_t block)
{
    return dst_base + (layer * dst_blocks + block) * piece;
}

/* --- copies ------------------------------------------------------------------------------- */

static void copy_plain(char *dst, const char *src, size_t n)
{
    memcpy(dst, src, n);
}

#ifdef __x86_64__
/* Two pages at a time keep more of the hardware's prefetchers and write buffers busy than one
   run through the piece does. */
#define STREAM_BODY(VECTOR, LOAD, STORE)                                                   \
    const size_t page = 4096, step = 4 * sizeof(VECTOR);                                   \
    size_t at = 0;                                                                         \
    for (; at + 2 * page <= n; at += 2 * page)                                             \
        for (size_t i = 0; i < page; i += step)                                            \
            for (size_t half = 0; half < 2; half++) {                                      \
                const VECTOR *from = (const VECTOR *)(src + at + half * page + i);         \
                VECTOR *to = (VECTOR *)(dst + at + half * page + i);                       \
                VECTOR a = LOAD(from), b = LOAD(from + 1);                                 \
                VECTOR c = LOAD(from + 2), d = LOAD(from + 3);                             \
                STORE(to, a), STORE(to + 1, b), STORE(to + 2, c), STORE(to + 3, d);        \
            }                                                                              \
    for (; at + sizeof(VECTOR) <= n; at += sizeof(VECTOR))                                 \
        STORE((VECTOR *)(dst + at), LOAD((const VECTOR *)(src + at)));                     \
    memcpy(dst + at, src + at, n - at);                                                    \
    _mm_sfence()

static void copy_stream_sse2(char *dst, const char *src, size_t n)
{
    STREAM_BODY(__m128i, _mm_loadu_si128, _mm_stream_si128);
}

__attribute__((target("avx"))) static void copy_stream_avx(char *dst, const char *src, size_t n)
{
    STREAM_BODY(__m256i, _mm256_loadu_si256, _mm256_stream_si256);
}

/* Streaming stores want aligned destinations; pages and pieces decide that once for all. */
static copy_fn copy_stream(void)
{
    if (piece % 32 == 0 && __builtin_cpu_supports("avx"))
        return copy_stream_avx;
    return piece % 16 == 0 ? copy_stream_sse2 : NULL;
}
#else
static copy_fn copy_stream(void)
{
    return NULL;
}
#endif

/* --- threads ------------------------------------------------------------------------------ */

static pthread_barrier_t begin, end;
static atomic_size_t next_block;
static void (*work)(size_t thread);
static size_t num_threads;
static copy_fn copy;

static void *thread_main(void *arg)
{
    for (;;) {
        pthread_barrier_wait(&begin);
        work((size_t)arg);
        pthread_barrier_wait(&end);
    }
    return NULL;
}

static void start_threads(size_t n)
{
    num_threads = n;
    pthread_barrier_init(&begin, NULL, (unsigned)n + 1);
    pthread_barrier_init(&end, NULL, (unsigned)n + 1);
    for (size_t i = 0; i < n; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, thread_main, (void *)i))
            fail("cannot start thread %zu of %zu", i + 1, n);
    }
}

static void run_threads(void (*job)(size_t))
{
    work = job;
    atomic_store(&next_block, 0);
    pthread_barrier_wait(&begin);
    pthread_barrier_wait(&end);
}

/* Blocks are handed out one by one, so that a thread that the system holds up costs little. */
static void job_copy(size_t thread)
{
    (void)thread;
    for (;;) {
        size_t i = atomic_fetch_add(&next_block, 1);
        if (i >= count)
            return;
        for (size_t layer = 0; layer < layers; layer++)
            copy(dst_at(layer, dst_ids[i]), src_at(layer, src_ids[i]), piece);
    }
}

/* --- tcp ---------------------------------------------------------------------------------- */

static int sender = -1, receiver = -1;
static char congestion[16];

static void move_iovecs(int sending, struct iovec *iov, size_t n)
{
    struct msghdr message = {0};
    while (n) {
        message.msg_iov = iov;
        message.msg_iovlen = n;
        ssize_t done = sending ? sendmsg(sender, &message, MSG_NOSIGNAL)
                               : recvmsg(receiver, &message, MSG_WAITALL);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            fail("%s: %s", sending ? "sendmsg" : "recvmsg", done ? strerror(errno) : "closed");
        size_t left = (size_t)done;
        while (n && left >= iov->iov_len)
            left -= iov->iov_len, iov++, n--;
        if (left) {
            iov->iov_base = (char *)iov->iov_base + left;
            iov->iov_len -= left;
        }
    }
}

static void job_tcp(size_t thread)
{
    struct iovec iov[IOVECS];
    size_t n = 0;
    for (size_t i = 0; i < count; i++)
        for (size_t layer = 0; layer < layers; layer++) {
            iov[n].iov_base = thread == 0 ? src_at(layer, src_ids[i]) : dst_at(layer, dst_ids[i]);
            iov[n++].iov_len = piece;
            if (n == IOVECS) {
                move_iovecs(thread == 0, iov, n);
                n = 0;
            }
        }
    if (n)
        move_iovecs(thread == 0, iov, n);
}

static void choose_congestion(int fd, const char *name)
{
    if (*name && setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name)))
        fail("congestion control %s: %s", name, strerror(errno));
}

static void connect_pair(const char *name)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address, congestion_length = sizeof congestion - 1;
    int one = 1;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) ||
        listen(listener, 1) || getsockname(listener, (struct sockaddr *)&address, &length))
        fail("loopback listener: %s", strerror(errno));
    choose_congestion(listener, name);
    sender = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (sender < 0)
        fail("socket: %s", strerror(errno));
    choose_congestion(sender, name);
    if (connect(sender, (struct sockaddr *)&address, length))
        fail("connect: %s", strerror(errno));
    receiver = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (receiver < 0)
        fail("accept: %s", strerror(errno));
    close(listener);
    setsockopt(sender, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (getsockopt(sender, IPPROTO_TCP, TCP_CONGESTION, congestion, &congestion_length))
        fail("getsockopt: %s", strerror(errno));
}

/* --- before and after --------------------------------------------------------------------- */

static void job_wipe(size_t thread)
{
    size_t total = layers * dst_blocks * piece, part = total / num_threads;
    size_t from = thread * part, to = thread + 1 == num_threads ? total : from + part;
    memset(dst_base + from, WIPED, to - from);
}

static atomic_size_t wrong_words;

/* One word of the oracle; see kvd/bench/oracle.py. */
static uint64_t oracle(size_t layer, size_t block, size_t word)
{
    return (uint64_t)layer << 48 | (uint64_t)block << 24 | (uint64_t)word;
}

static void job_verify(size_t thread)
{
    (void)thread;
    size_t bad = 0;
    for (;;) {
        size_t block = atomic_fetch_add(&next_block, 1);
        if (block >= dst_blocks)
            break;
        for (size_t layer = 0; layer < layers; layer++) {
            const uint64_t *words = (const uint64_t *)dst_at(layer, block);
            if (wanted[block])
                for (size_t i = 0; i < piece / 8; i++)
                    bad += words[i] != oracle(layer, origin[block], i);
            else
                for (size_t i = 0; i < piece / 8; i++)
                    bad += words[i] != UINT64_MAX;
        }
    }
    atomic_fetch_add(&wrong_words, bad);
}

struct result {
    const char *method;
    double seconds, cpu_seconds;
};

static struct result measure(const char *method, void (*job)(size_t))
{
    run_threads(job_wipe);
    double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID), start = seconds(CLOCK_MONOTONIC);
    run_threads(job);
    double took = seconds(CLOCK_MONOTONIC) - start;
    cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    atomic_store(&wrong_words, 0);
    run_threads(job_verify);
    if (atomic_load(&wrong_words))
        fail("%zu wrong words after %s", atomic_load(&wrong_words), method);
    return (struct result){method, took, cpu};
}

static void read_ids(void)
{
    if (count > dst_blocks)
        fail("%zu blocks do not fit into %zu", count, dst_blocks);
    if (fread(src_ids, sizeof *src_ids, count, stdin) != count ||
        fread(dst_ids, sizeof *dst_ids, count, stdin) != count)
        fail("block ids are missing");
    memset(wanted, 0, dst_blocks);
    for (size_t i = 0; i < count; i++) {
        if (src_ids[i] >= src_blocks || dst_ids[i] >= dst_blocks || wanted[dst_ids[i]])
            fail("block %zu of the list is out of range or there twice", i);
        wanted[dst_ids[i]] = 1;
        origin[dst_ids[i]] = src_ids[i];
    }
}

/* --- set-up ------------------------------------------------------------------------------- */

static char *map(char *fds, size_t blocks, int protection)
{
    size_t total = layers * blocks * piece, parts = 1, done = 0;
    for (char *c = fds; *c; c++)
        parts += *c == ',';
    size_t part = total / parts;
    if (total % parts || (parts > 1 && part % (size_t)sysconf(_SC_PAGESIZE)))
        fail("%zu bytes cannot be mapped from %zu files", total, parts);
    char *base = mmap(NULL, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        fail("mmap of %zu bytes: %s", total, strerror(errno));
    for (char *name = strtok(fds, ","); name; name = strtok(NULL, ","), done += part)
        if (mmap(base + done, part, protection, MAP_SHARED | MAP_FIXED | MAP_POPULATE, atoi(name),
                 0) == MAP_FAILED)
            fail("mmap of fd %s: %s", name, strerror(errno));
    return base;
}

int main(int argc, char **argv)
{
    if (argc != 9)
        fail("usage: limit shm|tcp SRC_FDS DST_FDS LAYERS SRC_BLOCKS DST_BLOCKS PIECE "
             "THREADS|CONGESTION");
    int tcp = strcmp(argv[1], "tcp") == 0;
    layers = strtoul(argv[4], NULL, 10);
    src_blocks = strtoul(argv[5], NULL, 10);
    dst_blocks = strtoul(argv[6], NULL, 10);
    piece = strtoul(argv[7], NULL, 10);
    if (!layers || !src_blocks || !dst_blocks || !piece || piece % 8)
        fail("sizes must be positive and PIECE a multiple of 8");
    src_base = map(argv[2], src_blocks, PROT_READ);
    dst_base = map(argv[3], dst_blocks, PROT_READ | PROT_WRITE);
    src_ids = calloc(dst_blocks, sizeof *src_ids);
    dst_ids = calloc(dst_blocks, sizeof *dst_ids);
    origin = calloc(dst_blocks, sizeof *origin);
    wanted = calloc(dst_blocks, 1);
    if (!src_ids || !dst_ids || !origin || !wanted)
        fail("out of memory");
    if (tcp) {
        connect_pair(argv[8]);
        start_threads(2);
    } else {
        size_t threads = strtoul(argv[8], NULL, 10);
        if (!threads || threads > MAX_THREADS)
            fail("threads must be 1 to %d", MAX_THREADS);
        start_threads(threads);
    }
    while (scanf("run %zu", &count) == 1 && getchar() == '\n') {
        struct result results[2];
        size_t n = 0;
        read_ids();
        if (tcp) {
            results[n++] = measure("tcp", job_tcp);
        } else {
            copy = copy_plain;
            results[n++] = measure("memcpy", job_copy);
            if ((copy = copy_stream()))
                results[n++] = measure("nontemporal", job_copy);
        }
        printf("{\"ok\": true, \"congestion\": \"%s\", \"runs\": [", congestion);
        for (size_t i = 0; i < n; i++)
            printf("%s{\"method\": \"%s\", \"seconds\": %.9f, \"cpu_seconds\": %.9f}",
                   i ? ", " : "", results[i].method, results[i].seconds, results[i].cpu_seconds);
        printf("]}\n");
        fflush(stdout);
    }
    return 0;
}
