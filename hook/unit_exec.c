// SPDX-License-Identifier: Apache-2.0
/*
 * Assigns this process to the workload of its systemd unit, and then executes the command of the unit.
 *
 *   resctrlmon-unit-exec COMMAND [ARGUMENT...]      argv[0] of the command is COMMAND
 *   resctrlmon-unit-exec @ COMMAND ARGV0 [ARGUMENT...]
 *
 * 'resctrlctl units exact' puts it before each command of a service. The call names nobody: resctrlmond takes the
 * process from the connection. Whatever fails, the command is executed. The program waits for the daemon for at most 2 s,
 * and longer, up to 30 s, only while the daemon notifies it again and again that its call is being handled: many services
 * may start at once. It ignores what the daemon replies in the end. The command gets the environment, the descriptors, the signal mask and the signal
 * dispositions of this process. So there is no timer here: the socket does not block, and poll() has a time limit.
 * The program allocates no memory. It is linked statically, because a sandbox may hide the libraries.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

// ListenStream= of resctrlmond-unit.socket. Tests compile the program with another path.
#ifndef SOCKET
#define SOCKET "/run/resctrlmond/org.resctrlmon.Unit"
#endif

// systemd.exec(5), "Process Exit Codes": the command could not be executed; and that of a wrong command line.
enum { EXIT_EXEC = 203, EXIT_USAGE = 2 };
// In milliseconds: the longest wait for the daemon, or for its next notice; the longest wait in all; and the pause before
// connect() is repeated while the daemon's queue is full.
enum { LONGEST = 2000, LONGEST_IN_ALL = 30000, PAUSE = 10 };

// The call without its number, and what follows that; the zero byte ends the message.
static const char CALL[] = "{\"method\":\"org.resctrlmon.Unit.AssignSelf\",\"more\":true,\"parameters\":{\"childrenUs\":";
static const char CALL_END[] = "}}";
// The end of a notice, after which another message follows: resctrlmond's JSON has no blanks, and this member is the last.
static const char CONTINUES[] = "\"continues\":true}";

static long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000L + time.tv_nsec / 1000000L;
}

/* Wait until the descriptor (-1: none) is ready, or for so long. Return whether it is ready before the deadline. */
static int wait_for(int descriptor, short events, long deadline, long longest)
{
    struct pollfd one = {.fd = descriptor, .events = events};
    long left = deadline - now();
    // A signal that has a handler cannot arrive: execve() has reset all handlers. A debugger can interrupt, though.
    return left > 0 && (poll(&one, 1, (int)(left < longest ? left : longest)) > 0 || errno == EINTR);
}

/* Connect to the daemon. A full queue is not an error before the deadline. Return whether that succeeded. */
static int connect_to(int daemon, long deadline)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET};
    for (;;) {
        if (connect(daemon, (struct sockaddr *)&address, sizeof address) == 0)
            return 1;
        if ((errno != EAGAIN && errno != EINTR) || now() >= deadline)
            return 0;
        wait_for(-1, 0, deadline, PAUSE);
    }
}

/* Read messages until the last one, which is not a notice, or until the time is up. */
static void await_reply(int daemon, long begin)
{
    char message[4096];
    size_t size = 0;
    long deadline = begin + LONGEST;
    while (wait_for(daemon, POLLIN, deadline, LONGEST)) {
        ssize_t count = recv(daemon, message + size, sizeof message - size, 0);
        if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR))
            return;
        size += count > 0 ? (size_t)count : 0;
        for (char *end; (end = memchr(message, '\0', size)) != NULL;) {
            size_t length = (size_t)(end - message), tail = sizeof CONTINUES - 1;
            if (length < tail || memcmp(end - tail, CONTINUES, tail) != 0)
                return;
            size -= length + 1;
            memmove(message, end + 1, size);
            deadline = now() + LONGEST;
            if (deadline > begin + LONGEST_IN_ALL)
                deadline = begin + LONGEST_IN_ALL;
        }
        // A message of this length is not from resctrlmond.
        if (size == sizeof message)
            return;
    }
}

/* Write the call into the message, with the CPU time of the children that have prepared this process. Return its size. */
static size_t write_call(char *message)
{
    struct rusage used = {0};
    char digits[24], *digit = digits + sizeof digits;
    getrusage(RUSAGE_CHILDREN, &used);
    unsigned long long us = (unsigned long long)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000ULL;
    us += (unsigned long long)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    do
        *--digit = (char)('0' + us % 10);
    while (us /= 10);
    size_t size = sizeof CALL - 1, count = (size_t)(digits + sizeof digits - digit);
    memcpy(message, CALL, size);
    memcpy(message + size, digit, count);
    memcpy(message + size + count, CALL_END, sizeof CALL_END);
    return size + count + sizeof CALL_END;
}

/* Have the daemon assign this process, and wait for the reply. */
static void assign_self(void)
{
    char message[sizeof CALL + 24 + sizeof CALL_END];
    size_t size = write_call(message);
    long begin = now();
    int daemon = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (daemon < 0)
        return;
    // The queue of a new connection has room for the message. MSG_NOSIGNAL: the daemon may have closed it.
    if (connect_to(daemon, begin + LONGEST) && send(daemon, message, size, MSG_NOSIGNAL) == (ssize_t)size)
        await_reply(daemon, begin);
    close(daemon);
}

static void complain(const char *what, const char *why)
{
    const char *parts[] = {"resctrlmon-unit-exec: ", what, ": ", why, "\n"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        (void)!write(2, parts[i], strlen(parts[i]));
}

int main(int argc, char **argv)
{
    int first = argc > 1 && strcmp(argv[1], "@") == 0 ? 2 : 1;
    // After "@", the command is followed by its argv[0].
    if (argc < 2 * first) {
        complain("usage", "resctrlmon-unit-exec [@] COMMAND [ARGUMENT...]");
        return EXIT_USAGE;
    }
    assign_self();
    const char *command = argv[first];
    execve(command, argv + 2 * first - 1, environ);
    complain(command, strerror(errno));
    return EXIT_EXEC;
}
