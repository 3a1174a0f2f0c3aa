// SPDX-License-Identifier: Apache-2.0
/*
 * The OCI hook: sends a container's state from stdin to resctrlmond and never stops the container from starting.
 *
 * resctrlmon-oci-hook(8) explains the arguments, limits, time-outs and messages. Every start of a container waits for
 * this program. It allocates no memory. Each call that can block is repeated after EINTR, and a timer interrupts it
 * again and again to look at the clock.
 */
#define _XOPEN_SOURCE 700
#include <asm/socket.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

// resctrlmond.service.message_ids.MessageId.UNMONITORED
#define MESSAGE_ID "47f76e48a28c4accae8c5c9183767327"
#define METHOD "{\"method\":\"org.resctrlmon.Hook.Run\","
#define MORE "\"more\":true,"
#define PARAMETERS "\"parameters\":{\"stage\":\""
#define QUEUE_TIMEOUT "\"queueTimeoutMs\":"
#define LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
// The longest state, string in it, message with its NUL, and reply; one read, and the longest reason in the journal. A
// pod has up to 256 KiB of annotations, and JSON has up to six bytes for one of them, such as "<". CRI-O includes all
// annotations once more, in one string.
enum { MAX_STATE = 1 << 23, MAX_STRING = 1 << 15, MAX_MESSAGE = 1 << 21, MAX_REPLY = 1 << 16, CHUNK = 1 << 16 };
enum { REASON = 16384 };
// The longest time in seconds that the daemon can make the hook wait in its queue (HookTimeout in configuration/config.py).
static const double MAX_QUEUE_TIMEOUT = 60;
// Seconds between two looks at the clock, and in the queue, where hundreds of hooks would keep the daemon from its work.
static const double TICK = 0.1, QUEUE_TICK = 0.5;
// For how many ticks after its timeout the hook reads a state that is there.
enum { MORE_TICKS = 10 };

static const char USAGE[] =
    "Usage: resctrlmon-oci-hook STAGE [OPTIONS] < STATE\n\n"
    "Put a container into its monitoring group. The runtime writes the container's state (JSON) to standard input.\n\n"
    "Stages:\n"
    "  createRuntime            the first process exists, and has not executed the container's program\n"
    "  prestart                 the older name of createRuntime\n"
    "  poststop                 the container was removed\n\n"
    "Options:\n"
    "  --strict                 exit with status 1 if resctrlmond did not accept the container\n"
    "  --socket PATH            the socket of resctrlmond (/run/resctrlmond/org.resctrlmon.Manager)\n"
    "  --timeout SECONDS        the longest wait for the state, and for resctrlmond (2)\n"
    "  --start-timeout SECONDS  the longest duration while resctrlmond starts or stops (10)\n"
    "  --journal PATH           the socket of the journal (/run/systemd/journal/socket)\n"
    "  --help                   print this, if it is the only argument\n\n"
    "See resctrlmon-oci-hook(8), which has a state to try by hand.\n";
static const char READING[] = "reading the state", WAITING[] = "waiting for resctrlmond";
static const char *stage = "", *step = READING;
static const char *daemon_path = "/run/resctrlmond/org.resctrlmon.Manager";
static const char *journal_path = "/run/systemd/journal/socket";
// is_sent: the daemon has the whole message.
static bool strict, has_stderr, is_sent;
// queue_timeout is 0 until the daemon replies that the call is queued.
static double timeout = 2.0, start_timeout = 10.0, queue_timeout, begin, counted;
static char mistake[REASON], state[MAX_STATE + CHUNK + 1], message[MAX_MESSAGE], reply[MAX_REPLY + CHUNK + 1];
static size_t state_size, message_size, reply_size;
static volatile sig_atomic_t rang, interrupted, code = -1;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void on_signal(int number)
{
    if (number == SIGALRM && code >= 0)
        _exit(code);
    *(number == SIGALRM ? &rang : &interrupted) = 1;
}

/* Ring after so many seconds, and then again and again: a signal just before a system call does not end its wait. */
static void set_timer(double first, double interval)
{
    struct itimerval timer = {{0, (suseconds_t)(interval * 1e6)}, {0, (suseconds_t)(first * 1e6) + 1}};
    setitimer(ITIMER_REAL, &timer, NULL);
}

/* Return the length of the UTF-8 character at text, 0 if it is not valid (RFC 3629), and its number in *number. */
static size_t character(const char *text, const char *end, unsigned long *number)
{
    static const unsigned long least[] = {0, 0, 0x80, 0x800, 0x10000};
    unsigned long first = (unsigned char)*text;
    size_t size = first < 0x80 ? 1 : first < 0xc0 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf8 ? 4 : 0;
    if (size == 0 || (size_t)(end - text) < size)
        return 0;
    *number = size == 1 ? first : first & (0x7fu >> size);
    for (size_t i = 1; i < size; i++) {
        if (((unsigned char)text[i] & 0xc0) != 0x80)
            return 0;
        *number = *number << 6 | ((unsigned char)text[i] & 0x3f);
    }
    return *number < least[size] || *number > 0x10ffff || (*number >= 0xd800 && *number < 0xe000) ? 0 : size;
}

/* Replace what is not printable by blanks, and bytes that are not UTF-8 by U+FFFD. A newline would begin another field
 * of the journal's protocol. */
static void clean(char *to, size_t room, const char *text)
{
    unsigned long c = 0;
    for (const char *end = text + strlen(text); text < end && room > 4;) {
        size_t size = character(text, end, &c);
        bool hidden = c < ' ' || (c >= 0x7f && c <= 0xa0) || c == 0xad || (c >= 0x200b && c <= 0x200f) ||
                      (c >= 0x2028 && c <= 0x202f) || (c >= 0x2060 && c <= 0x206f) || c == 0xfeff;
        const char *from = size == 0 ? "\xef\xbf\xbd" : hidden ? " " : text;
        size_t count = size == 0 ? 3 : hidden ? 1 : size;
        memcpy(to, from, count);
        to += count, room -= count, text += size ? size : 1;
    }
    *to = '\0';
}

/* Write the address of a socket; return whether its path is short enough. */
static bool set_address(struct sockaddr_un *address, const char *path)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address->sun_path)
        return false;
    memcpy(address->sun_path, path, strlen(path));
    return true;
}

/* Write to the journal what went wrong and what follows, then exit: 0, or 1 if strict. */
__attribute__((format(printf, 1, 2))) static _Noreturn void give_up(const char *format, ...)
{
    static char reason[REASON], text[4 * REASON], word[64], fields[5 * REASON];
    const char *outcome = strcmp(stage, "poststop") == 0 ? "resctrlmond must detect the container's end by itself"
                          : strict ? "the container does not start (--strict)"
                                   : "the container starts anyway, and may be unmonitored";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    clean(text, 3 * REASON, reason);
    snprintf(text + strlen(text), REASON, "; %s", outcome);
    clean(word, sizeof word, stage);
    int size = snprintf(fields, sizeof fields,
                        "MESSAGE=%s\nMESSAGE_ID=" MESSAGE_ID "\nPRIORITY=4\nSYSLOG_IDENTIFIER=resctrlmon-oci-hook\n"
                        "RESCTRLMON_STAGE=%s\n", text, word);
    struct sockaddr_un journal;
    // No journal, or a full one (EAGAIN): the container is more important than the message.
    if (set_address(&journal, journal_path))
        sendto(socket(AF_UNIX, SOCK_DGRAM, 0), fields, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL,
               (struct sockaddr *)&journal, sizeof journal);
    // A stderr that is full and not read blocks; from here on, the timer's signal exits.
    set_timer(0.5, TICK);
    code = strict;
    size = snprintf(fields, sizeof fields, "resctrlmon-oci-hook: %s\n", text);
    // Without a stderr, descriptor 2 may be a socket by now.
    if (strict && has_stderr)
        (void)!write(2, fields, (size_t)size);
    _exit(code);
}

static _Noreturn void fail(int error)
{
    give_up("failed %s: [Errno %d] %s", step, error, strerror(error));
}

/* Whether a daemon that starts or stops holds the lock beside its socket (resctrlmond/service/start_lock.py). */
static bool is_starting(void)
{
    static char path[4096];
    snprintf(path, sizeof path, "%s.starting", daemon_path);
    int file = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    bool is_held = file >= 0 && lockf(file, F_TEST, 0) != 0 && (errno == EACCES || errno == EAGAIN);
    if (file >= 0)
        close(file);
    return is_held;
}

/* Send the message without waiting, if the daemon does not have it: it assigns the container, late. The message goes
 * through a new connection, because the first one may have a part of it. */
static void hand_over(void)
{
    struct sockaddr_un name;
    int daemon = socket(AF_UNIX, SOCK_STREAM, 0), room = 2 * MAX_MESSAGE;
    // The daemon may not read now, so the whole message must fit, with the kernel's own data.
    if (setsockopt(daemon, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room) != 0)
        (void)!setsockopt(daemon, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    if (step == WAITING && !is_sent && set_address(&name, daemon_path) && fcntl(daemon, F_SETFL, O_NONBLOCK) == 0 &&
        connect(daemon, (struct sockaddr *)&name, sizeof name) == 0)
        (void)!send(daemon, message, message_size, MSG_NOSIGNAL);
    close(daemon);
}

/* Whether more of the state can be read without waiting. Not for ever: a stdin may never pause. */
static bool has_state(void)
{
    static int most = MORE_TICKS;
    struct pollfd input = {.fd = 0, .events = POLLIN};
    return step == READING && state_size <= MAX_STATE && poll(&input, 1, 0) > 0 && most-- > 0;
}

/* Give up if the time is up. Called before each system call that can block. */
static void check_time(void)
{
    if (interrupted)
        give_up("failed %s: ", step);
    if (!rang)
        return;
    rang = 0;
    double time = now(), start = strcmp(stage, "poststop") == 0 ? 0.0 : start_timeout;
    double most = queue_timeout > timeout ? queue_timeout : timeout;
    if (step == WAITING && time - begin < start && is_starting())
        counted = time;
    bool was_starting = counted > begin && time - begin >= (start > most ? start : most);
    if (!was_starting && time - counted < most)
        return;
    // On a busy host, this process itself may not have run for so long.
    if (has_state())
        return;
    hand_over();
    if (was_starting)
        give_up("gave up %s after %.0f s: it was starting or stopping", step, time - begin);
    give_up("gave up %s after %g s%s", step, most,
            queue_timeout > 0 ? ": the calls of other containers were before it" : "");
}

static void set_option(const char *option, const char *value)
{
    bool is_timeout = strcmp(option, "--timeout") == 0;
    if (is_timeout || strcmp(option, "--start-timeout") == 0) {
        char *end;
        double seconds = strtod(value, &end);
        // strtod() also reads blanks, "inf", "nan" and hexadecimal digits. With a --start-timeout of 0 a start is not
        // waited for.
        if (end == value || value[strspn(value, "0123456789.eE+-")] || *end || !(seconds >= 0 && seconds <= 3600) ||
            (is_timeout && seconds <= 0))
            snprintf(mistake, sizeof mistake, "%s '%s' is not a number of seconds", option, value);
        else
            *(is_timeout ? &timeout : &start_timeout) = seconds;
    } else if (*value == '\0') {
        snprintf(mistake, sizeof mistake, "%s requires a path", option);
    } else {
        *(strcmp(option, "--socket") == 0 ? &daemon_path : &journal_path) = value;
    }
}

/* Read the arguments. A mistake is reported only after stdin was read: a runtime may fail on a closed pipe. */
static void read_arguments(char **words)
{
    for (char **word = words; *word; word++)
        strict = strict || strcmp(*word, "--strict") == 0;
    for (char **word = words; *word; word++) {
        if (strcmp(*word, "--socket") == 0 || strcmp(*word, "--journal") == 0 || strcmp(*word, "--timeout") == 0 ||
            strcmp(*word, "--start-timeout") == 0) {
            set_option(word[0], word[1] ? word[1] : "");
            word += word[1] ? 1 : 0;
        } else if (strcmp(*word, "--strict") != 0) {
            // Letters need no escaping in the message. The daemon knows the stages.
            if (*stage || !**word || (*word)[strspn(*word, LETTERS)])
                snprintf(mistake, sizeof mistake, "unknown argument '%s'", *word);
            stage = *stage ? stage : *word;
        }
    }
    if (!*stage)
        snprintf(mistake, sizeof mistake, "the stage is missing");
}

/* End the run when its time is up, at whatever step. */
static void set_alarm(void)
{
    struct sigaction action = {.sa_handler = on_signal}, before;
    sigset_t alarm_only;
    begin = counted = now();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    if (sigaction(SIGINT, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(SIGINT, &action, NULL);
    sigaction(SIGALRM, &action, NULL);
    // Children inherit the mask; a runtime may have blocked everything.
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    sigprocmask(SIG_UNBLOCK, &alarm_only, NULL);
    set_timer(timeout < TICK ? timeout : TICK, TICK);
}

/* Read all of stdin. Bytes past the limit are read and dropped: a runtime may fail on a closed pipe. */
static void read_state(void)
{
    for (ssize_t count = 1; count != 0;) {
        check_time();
        count = read(0, state_size <= MAX_STATE ? state + state_size : message, CHUNK);
        if (count < 0 && errno != EINTR)
            fail(errno);
        if (count > 0 && state_size <= MAX_STATE)
            state_size += (size_t)count;
    }
}

static void append(const char *text, size_t size)
{
    if (size > MAX_MESSAGE - message_size)
        give_up("the message with the state is longer than %d bytes", MAX_MESSAGE);
    memcpy(message + message_size, text, size);
    message_size += size;
}

/* Replace each longer string of the state by "...". resctrlmond uses no such text, and the annotations that the user
 * of a pod writes must not keep its container from being counted. */
static void shorten_strings(void)
{
    size_t size = 0, first = 0;
    bool is_string = false, is_escaped = false;
    for (size_t i = 0; i < state_size; i++) {
        char letter = state[size++] = state[i];
        if (!is_escaped && letter == '"') {
            if (is_string && size - 1 - first > MAX_STRING) {
                memcpy(state + first, "...\"", 4);
                size = first + 4;
            }
            is_string = !is_string;
            first = size;
        }
        is_escaped = is_string && !is_escaped && letter == '\\';
    }
    state_size = size;
}

/* Write the varlink call, with the state as a JSON string: it cannot end the string, and so can neither add nor
 * replace a member of the message. */
static void write_message(void)
{
    unsigned long number;
    if (strspn(state, " \t\n\r\v\f") == state_size)
        give_up("the runtime wrote no state to stdin");
    if (state_size > MAX_STATE)
        give_up("the state is longer than %d bytes", MAX_STATE);
    shorten_strings();
    const char *end = state + state_size;
    for (const char *text = state; text < end; text++)
        if ((unsigned char)*text < ' ' && *text != '\t' && *text != '\n' && *text != '\r')
            give_up("the state contains control characters");
    append(METHOD, strlen(METHOD));
    // The daemon sees the end of a container by itself: its hook does not wait in the queue.
    append(MORE, strcmp(stage, "poststop") == 0 ? 0 : strlen(MORE));
    append(PARAMETERS, strlen(PARAMETERS));
    append(stage, strlen(stage));
    append("\",\"state\":\"", 11);
    for (const char *text = state; text < end;) {
        static const char special[] = "\"\\\n\r\t", escaped[] = "\"\\nrt";
        const char *found = strchr(special, *text);
        size_t size = character(text, end, &number);
        if (size == 0)
            give_up("the state is not UTF-8");
        append("\\", found ? 1 : 0);
        append(found ? &escaped[found - special] : text, size);
        text += size;
    }
    append("\"}}", 4);
}

/* Connect to the daemon and return the socket; exit if the caller may not. */
static int connect_to_daemon(void)
{
    struct sockaddr_un name;
    if (!set_address(&name, daemon_path))
        give_up("cannot connect to resctrlmond at %s: AF_UNIX path too long", daemon_path);
    int daemon = socket(AF_UNIX, SOCK_STREAM, 0);
    if (daemon < 0)
        fail(errno);
    // Blocking: otherwise connect() to a full backlog fails at once (EAGAIN) and does not queue.
    for (;;) {
        check_time();
        if (connect(daemon, (struct sockaddr *)&name, sizeof name) == 0)
            return daemon;
        if (errno == EACCES || errno == EPERM)
            _exit(0);
        if (errno != EINTR)
            give_up("cannot connect to resctrlmond at %s: %s", daemon_path, strerror(errno));
    }
}

/* Whether the reply is an error or not varlink, found without parsing it: resctrlmond's JSON has no blanks, and an
 * "error" is a string and the first or the last member. Similar text elsewhere is deeper inside, or has its quotes
 * escaped. */
static bool is_refusal(void)
{
    static const char error[] = ",\"error\":\"";
    const char *name = NULL;
    if (*reply != '{' || strncmp(reply, "{\"error\":\"", 10) == 0)
        return true;
    for (const char *found = reply; (found = strstr(found, error)) != NULL; name = found)
        found += strlen(error);
    return name && (name = strchr(name, '"')) && strcmp(name, "\"}") == 0;
}

/* Read a reply after which another one follows, which a member at its end says; return whether this is one. */
static bool read_notice(void)
{
    static const char end[] = "\"continues\":true}";
    static bool is_queued;
    size_t size = strlen(reply);
    if (is_refusal() || size < strlen(end) || strcmp(reply + size - strlen(end), end) != 0)
        return false;
    const char *digit = strstr(reply, QUEUE_TIMEOUT);
    double milliseconds = 0;
    digit = digit ? digit + strlen(QUEUE_TIMEOUT) : "";
    for (int i = 0; i < 9 && *digit >= '0' && *digit <= '9'; i++)
        milliseconds = 10 * milliseconds + (*digit++ - '0');
    queue_timeout = milliseconds / 1000 < MAX_QUEUE_TIMEOUT ? milliseconds / 1000 : MAX_QUEUE_TIMEOUT;
    // Once: the timer must not begin anew with each of endless replies.
    if (!is_queued)
        set_timer(QUEUE_TICK, QUEUE_TICK);
    is_queued = true;
    reply_size -= size + 1;
    memmove(reply, reply + size + 1, reply_size);
    return true;
}

/* Send the message to the daemon and read its last reply, which is empty if it closes the connection first. */
static void exchange(void)
{
    int daemon = connect_to_daemon();
    size_t sent = 0;
    ssize_t count = 1;
    reply_size = 0;
    is_sent = false;
    while (count != 0) {
        check_time();
        bool is_whole = memchr(reply, '\0', reply_size) != NULL;
        if (is_whole && read_notice())
            continue;
        if (is_whole || reply_size > MAX_REPLY)
            break;
        bool is_sending = sent < message_size;
        if (is_sending)
            count = send(daemon, message + sent, message_size - sent, MSG_NOSIGNAL);
        else
            count = recv(daemon, reply + reply_size, CHUNK, 0);
        if (count > 0)
            *(is_sending ? &sent : &reply_size) += (size_t)count, is_sent = sent == message_size;
        else if (errno == EPIPE || errno == ECONNRESET || errno == ECONNABORTED || errno == ECONNREFUSED)
            break;
        else if (count < 0 && errno != EINTR)
            fail(errno);
    }
    close(daemon);
}

/* Write the text of a member of the reply, "" if it has none. Within a string a quote is escaped, so a member's name
 * between two quotes can be nowhere else. */
static void read_text(char *to, const char *name)
{
    const char *from = strstr(reply, name);
    for (from = from ? from + strlen(name) : ""; *from && *from != '"';) {
        bool is_escape = *from == '\\', is_unicode = is_escape && from[1] == 'u';
        bool is_shown = !is_escape || from[1] == '"' || from[1] == '\\' || from[1] == '/';
        // An escaped control character becomes a blank.
        *to++ = is_shown ? from[is_escape] : ' ';
        from += is_unicode ? strnlen(from, 6) : is_escape ? strnlen(from, 2) : 1;
    }
    *to = '\0';
}

int main(int count, char **words)
{
    static char text[4097], remedy[4097];
    has_stderr = fcntl(2, F_GETFD) >= 0;
    if (count == 2 && strcmp(words[1], "--help") == 0) {
        (void)!write(1, USAGE, sizeof USAGE - 1);
        return 0;
    }
    if (count > 0)
        read_arguments(words + 1);
    set_alarm();
    read_state();
    if (*mistake)
        give_up("wrong arguments: %s", mistake);
    write_message();
    // The daemon does not delay the reading of the state.
    begin = counted = now();
    step = WAITING;
    // Again without a reply: a daemon that stops closes the connections whose call it has not begun, and the next daemon
    // accepts the second one. A repeated call changes nothing.
    exchange();
    if (reply_size == 0)
        exchange();
    if (strnlen(reply, reply_size) > MAX_REPLY)
        give_up("the reply of resctrlmond is longer than %d bytes", MAX_REPLY);
    if (memchr(reply, '\0', reply_size) == NULL)
        give_up("resctrlmond closed the connection without a reply");
    if (!is_refusal())
        _exit(0);
    reply[4096] = '\0';
    read_text(text, "\"message\":\"");
    if (!*text)
        read_text(text, "\"error\":\"");
    if (!*text)
        snprintf(text, sizeof text, "%.200s", reply);
    read_text(remedy, "\"remedy\":\"");
    give_up("resctrlmond refused: %s%s%s", text, *remedy ? ". " : "", remedy);
}
