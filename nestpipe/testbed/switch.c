// nestpipe-switch: several hosts on one machine. Creates one network namespace per host and one for the switch
// between them, carries packets from each host to its switch port after a fixed delay, and ends with its owner.
//
//   nestpipe-switch HOSTS DELAY_US OWNER_PIPE ...   (further arguments describe the testbed to readers of /proc)
//
// The namespaces have no names: this process holds them, as /proc/<pid>/fd/<n>, so the kernel removes them once
// this process and the ones inside them have ended. Nothing is left to clean up, however they ended.
// Prints "ready <descriptor of the switch> <descriptor of host 0> ..." when the namespaces exist.
// DELAY_US > 0: TAP pairs host<i> <-> port<i> exist in the switch's namespace; the caller moves host<i> into its
// host. 0: the caller links the hosts by veth pairs, and this process carries nothing.
// OWNER_PIPE 1: end of file on standard input ends the process. 0: it lives until it is killed.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum {
  MAX_PACKET = 70000,    // a whole 64 KiB segment (TSO) and its headers
  PACKETS_PER_TURN = 64, // so that one busy host does not starve the others
  TIMER_SLACK_NS = 1000,
};

// Packets in flight. The delay is one constant, so the order of arrival is the order of departure.
typedef struct packet {
  struct packet *next;
  long long due_ns;
  int to, size;
  char data[];
} packet;
static packet *first, **last = &first;

static void fail(const char *what) {
  fprintf(stderr, "nestpipe-switch: %s: %s\n", what, strerror(errno));
  exit(1);
}

static long long now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int new_namespace(void) {
  if (unshare(CLONE_NEWNET) < 0) fail("cannot create a network namespace");
  int descriptor = open("/proc/self/ns/net", O_RDONLY);
  if (descriptor < 0) fail("/proc/self/ns/net");
  return descriptor;
}

// A TAP device that passes unsegmented TCP packets whole, which keeps the cost per byte low.
static int open_tap(const char *kind, int index) {
  int descriptor = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  if (descriptor < 0) fail("/dev/net/tun");
  struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
  snprintf(request.ifr_name, IFNAMSIZ, "%s%d", kind, index);
  if (ioctl(descriptor, TUNSETIFF, &request) < 0) fail("cannot create a TAP device");
  ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN); // slower without this
  return descriptor;
}

// A packet that the device does not accept is dropped, as a full switch would drop it; TCP sends it again.
static void deliver(int to, const char *data, int size) {
  if (write(to, data, size) < 0) return;
}

static void send_later(int to, const char *data, int size, long long due_ns) {
  packet *entry = malloc(sizeof *entry + size);
  if (!entry) return;
  *entry = (packet){.due_ns = due_ns, .to = to, .size = size};
  memcpy(entry->data, data, size);
  *last = entry;
  last = &entry->next;
}

// Sends the packets that are due. Returns the time until the next one is due, or -1 if no packet is in flight.
static long long send_due(void) {
  while (first) {
    long long left_ns = first->due_ns - now_ns();
    if (left_ns > 0) return left_ns;
    packet *entry = first;
    deliver(entry->to, entry->data, entry->size);
    if (!(first = entry->next)) last = &first;
    free(entry);
  }
  return -1;
}

int main(int count, char **arguments) {
  if (count < 4) return fprintf(stderr, "usage: nestpipe-switch HOSTS DELAY_US OWNER_PIPE\n"), 2;
  int hosts = atoi(arguments[1]), owner_pipe = atoi(arguments[3]);
  long long delay_ns = atoll(arguments[2]) * 1000;
  prctl(PR_SET_NAME, "nestpipe-switch");

  int *namespaces = calloc(hosts, sizeof *namespaces);
  for (int host = 0; host < hosts; host++) namespaces[host] = new_namespace();
  int switch_namespace = new_namespace(); // created last: this process stays in it

  // poll set: 2h is host h's end, 2h + 1 its port, the last one the owner's pipe
  int links = delay_ns > 0 ? 2 * hosts : 0;
  struct pollfd *polled = calloc(links + 1, sizeof *polled);
  for (int host = 0; host < links / 2; host++) {
    polled[2 * host] = (struct pollfd){open_tap("host", host), POLLIN, 0};
    polled[2 * host + 1] = (struct pollfd){open_tap("port", host), POLLIN, 0};
  }
  polled[links] = (struct pollfd){owner_pipe ? STDIN_FILENO : -1, 0, 0}; // hang-up is always reported

  printf("ready %d", switch_namespace);
  for (int host = 0; host < hosts; host++) printf(" %d", namespaces[host]);
  printf("\n");
  fflush(stdout);
  prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
  setpriority(PRIO_PROCESS, 0, -20); // a late relay would make the delay longer

  static char buffer[MAX_PACKET];
  for (;;) {
    long long wait_ns = send_due();
    struct timespec wait = {wait_ns / 1000000000, wait_ns % 1000000000};
    if (ppoll(polled, links + 1, wait_ns < 0 ? NULL : &wait, NULL) < 0) continue;
    if (polled[links].revents & (POLLHUP | POLLERR)) return 0;
    for (int end = 0; end < links; end++) {
      if (!(polled[end].revents & POLLIN)) continue;
      for (int turn = 0; turn < PACKETS_PER_TURN; turn++) {
        int size = read(polled[end].fd, buffer, sizeof buffer);
        if (size <= 0) break;
        if (end % 2 == 0)
          send_later(polled[end + 1].fd, buffer, size, now_ns() + delay_ns);
        else
          deliver(polled[end - 1].fd, buffer, size);
      }
    }
  }
}
