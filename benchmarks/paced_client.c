/* The least that a client can cost: what paced_server's streams take to be read in C, with the kernel's time stamps.
 *
 *   paced_client PORT CONNECTIONS ROUNDS
 *
 * Closed loop, one request after the other on each connection; sockets are drained each 2 ms, one recvmsg per stream.
 * Nothing is parsed but the end of a response. Prints JSON: CPU time per read, p50 and p99 of the TTFT in ms, seconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int left, reads;
    int64_t sent, *stamps;
    int n, room;
} Stream;

static int64_t now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static const char *request;

static void ask(Stream *streams, int fd) {
    Stream *s = &streams[fd];
    s->reads = 0;
    s->left--;
    s->sent = now_ns(CLOCK_REALTIME);
    if (send(fd, request, strlen(request), MSG_NOSIGNAL) < 0) { perror("send"); exit(1); }
}

int main(int argc, char **argv) {
    if (argc != 4) { fprintf(stderr, "usage: %s PORT CONNECTIONS ROUNDS\n", argv[0]); return 1; }
    int connections = atoi(argv[2]), rounds = atoi(argv[3]), live = connections, one = 1, epfd = epoll_create1(0);
    char made[2048];
    const char *body = "{\"model\":\"paced\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"stream\":true}";
    sprintf(made, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
            strlen(body), body);
    request = made;
    Stream *streams = calloc(connections + 100, sizeof(Stream));
    double *ttft = malloc(sizeof(double) * connections * rounds), began_cpu = 0;
    int answered = 0;
    int64_t reads = 0, began = 0;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event *events = malloc(sizeof *events * connections);
    for (int i = 0; i < connections; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd >= connections + 100 || connect(fd, (void *)&at, sizeof at)) { perror("connect"); return 1; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
        streams[fd].left = rounds;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &e);
    }
    began_cpu = cpu_s();
    began = now_ns(CLOCK_MONOTONIC);
    for (int fd = 0; fd < connections + 100; fd++)
        if (streams[fd].left) ask(streams, fd);
    static char data[65536], control[64];
    while (live) {
        struct timespec pause = {0, 2000000};
        nanosleep(&pause, NULL);
        int n = epoll_wait(epfd, events, connections, 0);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            Stream *s = &streams[fd];
            struct iovec into = {data, sizeof data};
            struct msghdr m = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
            ssize_t got = recvmsg(fd, &m, MSG_DONTWAIT);
            if (got <= 0) { fprintf(stderr, "a connection ended\n"); return 1; }
            int64_t stamp = 0;
            struct cmsghdr *c = CMSG_FIRSTHDR(&m);
            if (c) { struct timespec t; memcpy(&t, CMSG_DATA(c), sizeof t); stamp = t.tv_sec * 1000000000LL + t.tv_nsec; }
            if (s->n == s->room) s->stamps = realloc(s->stamps, sizeof(int64_t) * (s->room = s->room ? 2 * s->room : 128));
            s->stamps[s->n++] = stamp;
            reads++;
            if (s->reads++ == 1 && stamp) ttft[answered++] = (stamp - s->sent) / 1e6; /* the first read is the headers */
            if (got < 5 || memcmp(data + got - 5, "0\r\n\r\n", 5)) continue;
            if (s->left) ask(streams, fd);
            else { live--; close(fd); }
        }
    }
    double took = (now_ns(CLOCK_MONOTONIC) - began) / 1e9, used = cpu_s() - began_cpu;
    qsort(ttft, answered, sizeof *ttft, by_size);
    printf("{\"cpu_us\": %.2f, \"ttft_p50_ms\": %.3f, \"ttft_p99_ms\": %.3f, \"took_s\": %.3f, \"reads\": %lld}\n",
           used / reads * 1e6, ttft[answered / 2], ttft[answered * 99 / 100], took, (long long)reads);
    return 0;
}
