/* A server of known schedule: the truth that a load generator's readings are held against.
 *
 *   paced_server PORT TTFT_MS GAP_MS CHUNKS TICK_MS SPREAD LOG
 *
 * Answers every POST with an event stream: the headers at once, the first chunk TTFT_MS after the request was complete
 * (by the kernel's stamp: many that come at once wait for nobody), one more each GAP_MS, CHUNKS in all, then usage and
 * [DONE]. With TICK_MS above 0 every chunk waits for the next tick of one clock, as the streams of an engine's batch do.
 * With SPREAD above 0 the first SPREAD answers are of all lengths up to CHUNKS, each as often as another: a closed loop
 * of so many users has its ends spread evenly from then on. GET /v1/models names the model "paced".
 *
 * Each chunk's send time is kept and written to LOG at the end (SIGTERM), one line a request:
 *   ID RECEIVED_NS FIRST_SEND_NS SEND_NS... (CLOCK_MONOTONIC; differences to the one before, from the third number on)
 * Its own lateness (send minus due) goes to stderr: a reading cannot be better than that.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_FD 20000
#define MAX_REQUESTS 2000000
#define IN_BYTES 65536
#define CONTENT_BYTES 5 /* as long as the text of a token is on average */

typedef struct {
    char *in;
    int in_len, sent, slot, chunks;
    int64_t due, received;
} Conn;

typedef struct {
    char id[64];
    int64_t received;
    int64_t *sends;
    int n;
} Logged;

static Conn conns[MAX_FD];
static Logged logged[MAX_REQUESTS];
static int n_logged, epfd, timer_fd, chunks, spread;
static int64_t ttft, gap, tick;
static int heap[MAX_FD], heap_n;
static volatile sig_atomic_t stop;
static uint32_t late_us[200001];

static int64_t ns(struct timespec t) { return t.tv_sec * 1000000000LL + t.tv_nsec; }

static int64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return ns(t);
}

static int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static void on_term(int sig) { (void)sig; stop = 1; }

static void heap_push(int fd) {
    int i = heap_n++;
    while (i && conns[heap[(i - 1) / 2]].due > conns[fd].due) { heap[i] = heap[(i - 1) / 2]; i = (i - 1) / 2; }
    heap[i] = fd;
}

static int heap_pop(void) {
    int top = heap[0], last = heap[--heap_n], i = 0;
    for (;;) {
        int c = 2 * i + 1;
        if (c >= heap_n) break;
        if (c + 1 < heap_n && conns[heap[c + 1]].due < conns[heap[c]].due) c++;
        if (conns[heap[c]].due >= conns[last].due) break;
        heap[i] = heap[c];
        i = c;
    }
    heap[i] = last;
    return top;
}

static int64_t on_tick(int64_t due) { return tick ? (due + tick - 1) / tick * tick : due; }

static void drop(int fd) {
    int n = heap_n;
    heap_n = 0;
    for (int i = 0; i < n; i++) /* what is pushed lies never behind what is still to be read */
        if (heap[i] != fd) heap_push(heap[i]);
    free(conns[fd].in);
    conns[fd].in = NULL;
    close(fd);
}

static int put(int fd, const char *data, int len) {
    return send(fd, data, len, MSG_NOSIGNAL | MSG_DONTWAIT) == len ? 0 : -1;
}

static int chunked(char *out, const char *text) { return sprintf(out, "%zx\r\n%s\r\n", strlen(text), text); }

/* One chunk is due: write it down, send it. 1 when the stream is over. */
static int send_chunk(int fd) {
    Conn *c = &conns[fd];
    Logged *l = &logged[c->slot];
    char text[1024], out[2048];
    int len;
    sprintf(text,
            "data: {\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\"model\":\"paced\","
            "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%0*d\"},\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
            l->id, CONTENT_BYTES, c->sent, c->sent == c->chunks - 1 ? "\"length\"" : "null");
    len = chunked(out, text);
    if (c->sent == c->chunks - 1) {
        sprintf(text,
                "data: {\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\"model\":\"paced\","
                "\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":%d,\"total_tokens\":%d}}\n\ndata: [DONE]\n\n",
                l->id, c->chunks, c->chunks + 10);
        len += chunked(out + len, text);
        len += sprintf(out + len, "0\r\n\r\n");
    }
    int64_t at = now_ns(), late = (at - c->due) / 1000;
    late_us[late < 0 ? 0 : late > 200000 ? 200000 : late]++;
    l->sends[l->n++] = at;
    if (put(fd, out, len)) return -1;
    return ++c->sent == c->chunks;
}

static void answer(int fd) {
    Conn *c = &conns[fd];
    if (!strncmp(c->in, "GET", 3)) {
        const char *body = "{\"object\":\"list\",\"data\":[{\"id\":\"paced\",\"object\":\"model\"}]}";
        char out[512];
        int models = !strncmp(c->in, "GET /v1/models", 14), health = !strncmp(c->in, "GET /health", 11);
        if (!models) body = health ? "" : "{}";
        put(fd, out, sprintf(out, "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                             models || health ? "200 OK" : "404 Not Found", strlen(body), body));
        return;
    }
    if (strstr(c->in, "\"stream\":false") || strstr(c->in, "\"stream\": false")) {
        const char *body = "{\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"yes\"},\"finish_reason\":"
                           "\"stop\"}],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":1,\"total_tokens\":11}}";
        char out[1024];
        put(fd, out, sprintf(out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                             strlen(body), body));
        return;
    }
    if (n_logged == MAX_REQUESTS) { fprintf(stderr, "too many requests\n"); exit(1); }
    c->chunks = n_logged < spread ? 1 + (int64_t)n_logged * chunks / spread : chunks;
    c->slot = n_logged++;
    Logged *l = &logged[c->slot];
    char *id = strcasestr(c->in, "\nx-request-id:");
    if (!id || sscanf(id + 14, " %63[^\r\n]", l->id) != 1) sprintf(l->id, "-%d", c->slot);
    l->sends = malloc(sizeof(int64_t) * c->chunks);
    l->received = c->received;
    const char *head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    put(fd, head, strlen(head));
    c->sent = 0;
    c->due = on_tick(l->received + ttft);
    heap_push(fd);
}

static void readable(int fd) {
    Conn *c = &conns[fd];
    for (;;) {
        char control[64];
        struct iovec into = {c->in + c->in_len, IN_BYTES - 1 - c->in_len};
        struct msghdr m = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(fd, &m, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN)) { drop(fd); return; }
        if (n < 0) return;
        struct cmsghdr *stamp = CMSG_FIRSTHDR(&m);
        struct timespec came;
        if (stamp) memcpy(&came, CMSG_DATA(stamp), sizeof came);
        c->received = stamp ? ns(came) + now_ns() - clock_ns(CLOCK_REALTIME) : now_ns();
        c->in_len += n;
        c->in[c->in_len] = 0;
        char *end = strstr(c->in, "\r\n\r\n");
        if (!end) continue;
        char *length = strcasestr(c->in, "\ncontent-length:");
        int want = end + 4 - c->in + (length && length < end ? atoi(length + 16) : 0);
        if (want >= IN_BYTES) { drop(fd); return; }
        if (c->in_len < want) continue;
        c->in_len = 0; /* one request at a time: nothing of the next can be here */
        answer(fd);
    }
}

static void write_log(const char *path) {
    FILE *f = fopen(path, "w");
    for (int i = 0; f && i < n_logged; i++) {
        Logged *l = &logged[i];
        fprintf(f, "%s %lld", l->id, (long long)l->received);
        for (int k = 0; k < l->n; k++)
            fprintf(f, " %lld", (long long)(k ? l->sends[k] - l->sends[k - 1] : l->sends[0]));
        fputc('\n', f);
    }
    if (f) fclose(f);
    uint64_t all = 0, seen = 0;
    for (int i = 0; i <= 200000; i++) all += late_us[i];
    double marks[] = {0.5, 0.99, 0.999};
    int m = 0;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    fprintf(stderr, "{\"requests\": %d, \"chunks\": %llu, \"cpu_s\": %.3f, \"late_us\": {", n_logged, (unsigned long long)all,
            used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
    for (int i = 0; i <= 200000 && m < 3 && all; i++)
        for (seen += late_us[i]; m < 3 && seen >= marks[m] * all; m++)
            fprintf(stderr, "%s\"p%g\": %d", m ? ", " : "", marks[m] * 100, i);
    fprintf(stderr, "}}\n");
}

int main(int argc, char **argv) {
    if (argc != 8) { fprintf(stderr, "usage: %s PORT TTFT_MS GAP_MS CHUNKS TICK_MS SPREAD LOG\n", argv[0]); return 1; }
    ttft = atof(argv[2]) * 1e6;
    gap = atof(argv[3]) * 1e6;
    chunks = atoi(argv[4]);
    tick = atof(argv[5]) * 1e6;
    spread = atoi(argv[6]);
    struct rlimit files = {MAX_FD, MAX_FD};
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGTERM, on_term);
    signal(SIGINT, on_term);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(listener, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one); /* accepted sockets have it from here */
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 4096)) { perror("listen"); return 1; }
    epfd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, events[256];
    epoll_ctl(epfd, EPOLL_CTL_ADD, listener, &e);
    e.data.fd = timer_fd;
    epoll_ctl(epfd, EPOLL_CTL_ADD, timer_fd, &e);
    while (!stop) {
        while (heap_n && conns[heap[0]].due <= now_ns()) {
            int fd = heap_pop();
            int over = send_chunk(fd);
            if (over < 0) { drop(fd); continue; }
            if (!over) { conns[fd].due = on_tick(logged[conns[fd].slot].received + ttft + conns[fd].sent * gap); heap_push(fd); }
        }
        struct itimerspec when = {0};
        if (heap_n) {
            when.it_value.tv_sec = conns[heap[0]].due / 1000000000LL;
            when.it_value.tv_nsec = conns[heap[0]].due % 1000000000LL;
        }
        timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
        int n = epoll_wait(epfd, events, 256, 200);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == timer_fd) continue;
            if (fd != listener) { readable(fd); continue; }
            for (int made; (made = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
                if (made >= MAX_FD) { close(made); continue; }
                setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                conns[made] = (Conn){.in = malloc(IN_BYTES)};
                struct epoll_event m = {.events = EPOLLIN, .data.fd = made};
                epoll_ctl(epfd, EPOLL_CTL_ADD, made, &m);
            }
        }
    }
    write_log(argv[7]);
    return 0;
}
