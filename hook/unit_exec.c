// SPDX-License-Identifier: Apache-2.0
/*
 * Assigns this process to the workload of its systemd unit, and then executes the command of the unit.
 *
 *   resctrlmon-unit-exec COMMAND [ARGUMENT...]      argv[0] of the command is COMMAND
 *   resctrlmon-unit-exec @ COMMAND ARGV0 [ARGUMENT...]
 *
 * 'resctrlctl units exact' puts it before each command of a service. The call names nobody: resctrlmond takes the
 * process from the connection. Whatever fails, the command is executed: the program waits for at most 2 s, and ignores
 * what the daemon replies. The command gets the environment, the descriptors, the signal mask and the signal
 * dispositions of this process. So there is no timer here: the socket does not block, and poll() has a time limit.
 * The program allocates no memory. It is linked statically, because a sandbox may hide the libraries.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
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
// The longest wait in milliseconds, and the pause before connect() is repeated while the daemon's queue is full.
enum { LONGEST = 2000, PAUSE = 10 };

static const char CALL[] = "{\"method\":\"org.resctrlmon.Unit.AssignSelf\"}";

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

/* Have the daemon assign this process, and wait for the reply, which ends with a NUL. */
static void assign_self(void)
{
    char reply[4096];
    long deadline = now() + LONGEST;
    int daemon = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (daemon < 0)
        return;
    // The queue of a new connection has room for the message. MSG_NOSIGNAL: the daemon may have closed it.
    if (connect_to(daemon, deadline) && send(daemon, CALL, sizeof CALL, MSG_NOSIGNAL) == (ssize_t)sizeof CALL) {
        while (wait_for(daemon, POLLIN, deadline, LONGEST)) {
            ssize_t count = recv(daemon, reply, sizeof reply, 0);
            if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR) ||
                (count > 0 && memchr(reply, '\0', (size_t)count)))
                break;
        }
    }
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
