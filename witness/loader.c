// SPDX-License-Identifier: Apache-2.0
/* Load the program of the witness into the kernel, pin its files, and exit. See resctrlmond-witness(8). */
#define _GNU_SOURCE
#include <bpf/bpf.h>
#include <bpf/btf.h>
#include <bpf/libbpf.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <grp.h>
#include <linux/magic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "witness.h"

#define BPFFS "/sys/fs/bpf"
#define FILES BPFFS "/resctrlmond"
/* bpffs allows no dot in a name. */
#define NEW BPFFS "/resctrlmond-new"
#define CGROUP "/sys/fs/cgroup"
#define STATE "/run/resctrlmond/witness"
#define GROUP "resctrlmon"
#define UNAVAILABLE 69 /* EX_UNAVAILABLE */

#define ROWS 65536
#define MOVES 4096
#define KEEP_S 3600
#define NS_PER_S 1000000000ULL

/* The compiled program, in this file. */
extern const char object[], object_end[];
__asm__(".pushsection .rodata\n"
    ".balign 8\n"
    "object: .incbin \"" OBJECT "\"\n"
    "object_end: .byte 0\n"
    ".popsection\n");

static struct bpf_link *links[16];
static size_t links_used;
/* The last message of libbpf that is a warning. */
static char warning[512];

static int keep_warning(enum libbpf_print_level level, const char *format, va_list arguments)
{
    char text[sizeof(warning)];

    if (level != LIBBPF_WARN)
        return 0;
    vsnprintf(text, sizeof(text), format, arguments);
    text[strcspn(text, "\n")] = 0;
    /* The first one is nearest to the cause. A log of the verifier has many lines. */
    if (!warning[0])
        strcpy(warning, text);
    return 0;
}

/* Write the state for resctrlmond and administrators. Its failure changes nothing: it is reported by systemd too. */
static void write_state(const char *state, const char *reason, const char *detail)
{
    FILE *file;

    mkdir("/run/resctrlmond", 0755);
    mkdir(STATE, 0755);
    file = fopen(STATE "/state.new", "w");
    if (!file)
        return;
    fprintf(file, "state %s\n", state);
    if (reason)
        fprintf(file, "reason %s\ndetail %s\n", reason, detail);
    fchmod(fileno(file), 0644);
    if (fclose(file) || rename(STATE "/state.new", STATE "/state"))
        unlink(STATE "/state.new");
}

/* Report why there is no witness, and return the exit status. */
__attribute__((format(printf, 2, 3))) static int unavailable(const char *reason, const char *format, ...)
{
    char detail[1024];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(detail, sizeof(detail), format, arguments);
    va_end(arguments);
    write_state("unavailable", reason, detail);
    fprintf(stderr, "there is no witness (%s): %s\n", reason, detail);
    return UNAVAILABLE;
}

static int is_filesystem(const char *path, unsigned int magic)
{
    struct statfs status;

    return !statfs(path, &status) && (unsigned int)status.f_type == magic;
}

static int is_locked_down(void)
{
    char text[128] = "";
    FILE *file = fopen("/sys/kernel/security/lockdown", "r");

    if (file) {
        if (!fgets(text, sizeof(text), file))
            text[0] = 0;
        fclose(file);
    }
    return strstr(text, "[confidentiality]") != NULL;
}

/* Return the format version of the files that are pinned, 0 if there are none. */
static int pinned_format(void)
{
    int format = 0;
    FILE *file = fopen(FILES "/status", "r");

    if (file) {
        if (fscanf(file, "format %d", &format) != 1)
            format = 0;
        fclose(file);
    }
    return format;
}

/* Remove pins, which ends the programs. Return 0, or an errno. */
static int remove_pins(const char *directory)
{
    char path[512];
    struct dirent *entry;
    DIR *list = opendir(directory);
    int error = 0;

    if (!list)
        return errno == ENOENT ? 0 : errno;
    while (!error && (entry = readdir(list))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        snprintf(path, sizeof(path), "%s/%s", directory, entry->d_name);
        if (unlink(path))
            error = errno == EISDIR || errno == EPERM ? remove_pins(path) : errno;
    }
    closedir(list);
    if (!error && rmdir(directory))
        error = errno;
    return error;
}

/* Pin a link with a mode that libbpf cannot set. */
static int pin(struct bpf_link *link, const char *path, mode_t mode)
{
    struct group *group = getgrnam(GROUP);

    if (!link)
        return -1;
    links[links_used++] = link;
    if (bpf_link__pin(link, path) || chmod(path, mode))
        return -1;
    return group ? lchown(path, -1, group->gr_gid) : 0;
}

static int make_directory(const char *path, mode_t mode)
{
    struct group *group = getgrnam(GROUP);

    if (mkdir(path, mode) || chmod(path, mode))
        return -1;
    return group ? lchown(path, -1, group->gr_gid) : 0;
}

static struct bpf_link *attach_file(struct bpf_object *program, const char *name, const char *map)
{
    union bpf_iter_link_info info = {0};
    LIBBPF_OPTS(bpf_iter_attach_opts, options, .link_info = &info, .link_info_len = sizeof(info));

    if (map)
        info.map.map_fd = bpf_map__fd(bpf_object__find_map_by_name(program, map));
    return bpf_program__attach_iter(bpf_object__find_program_by_name(program, name), map ? &options : NULL);
}

static int attach_and_pin(struct bpf_object *program, struct settings *settings)
{
    /* on_free is the first: it removes accounts, and an address may be used again. */
    static const char *const hooks[] = {"on_free", "on_exit", "on_cgroup_move", "on_rmdir", "on_written", "on_write"};
    static const char *const files[][2] = {
        {"tasks", NULL}, {"ended", "sums"}, {"removed", "removals"}, {"moves", "ring"}, {"status", "settings"}};
    int map = bpf_map__fd(bpf_object__find_map_by_name(program, "settings"));
    char path[128];
    struct timespec now;
    __u32 zero = 0;

    if (make_directory(NEW, 0750) || make_directory(NEW "/hooks", 0700))
        return -1;
    for (size_t i = 0; i < sizeof(hooks) / sizeof(hooks[0]); i++) {
        struct bpf_program *hook = bpf_object__find_program_by_name(program, hooks[i]);

        if (!bpf_program__autoload(hook))
            continue;
        snprintf(path, sizeof(path), NEW "/hooks/%s", hooks[i]);
        if (pin(bpf_program__attach(hook), path, 0400))
            return -1;
    }
    clock_gettime(CLOCK_BOOTTIME, &now);
    settings->begun = now.tv_sec * NS_PER_S + now.tv_nsec;
    if (bpf_map_update_elem(map, &zero, settings, BPF_ANY))
        return -1;
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        snprintf(path, sizeof(path), NEW "/%s", files[i][0]);
        if (pin(attach_file(program, files[i][0], files[i][1]), path, 0440))
            return -1;
    }
    return 0;
}

/* Put the new files into the place of the old ones, of which a reader sees either. */
static int publish(void)
{
    if (!rename(NEW, FILES))
        return 0;
    if (renameat2(AT_FDCWD, NEW, AT_FDCWD, FILES, RENAME_EXCHANGE))
        return errno;
    return remove_pins(NEW);
}

static struct bpf_object *open_program(const struct settings *settings)
{
    LIBBPF_OPTS(bpf_object_open_opts, options, .object_name = "witness");
    struct bpf_object *program = bpf_object__open_mem(object, object_end - object, &options);

    if (!program)
        return NULL;
    bpf_map__set_max_entries(bpf_object__find_map_by_name(program, "sums"), settings->rows);
    bpf_map__set_max_entries(bpf_object__find_map_by_name(program, "removals"), settings->rows);
    bpf_map__set_max_entries(bpf_object__find_map_by_name(program, "accounts"), settings->rows);
    bpf_map__set_max_entries(bpf_object__find_map_by_name(program, "ring"), settings->moves);
    bpf_program__set_autoload(bpf_object__find_program_by_name(program, "on_cgroup_move"), settings->cgroup_moves);
    return program;
}

static int load(struct settings *settings)
{
    struct bpf_object *program;
    struct btf *kernel;
    int error, has_rmid;

    if (pinned_format() == FORMAT) {
        write_state("loaded", NULL, NULL);
        return 0;
    }
    if (!is_filesystem(CGROUP, CGROUP2_SUPER_MAGIC))
        return unavailable("no-cgroup2", "%s is not a mount of cgroup v2", CGROUP);
    if (!is_filesystem(BPFFS, BPF_FS_MAGIC))
        return unavailable("no-bpffs", "%s is not a mount of the BPF filesystem", BPFFS);
    kernel = btf__load_vmlinux_btf();
    if (!kernel)
        return unavailable("no-btf", "the kernel does not describe its types in /sys/kernel/btf/vmlinux: %s",
                   strerror(errno));
    settings->task_moves = btf__find_by_name_kind(kernel, "bpf_task_from_pid", BTF_KIND_FUNC) > 0;
    has_rmid = btf__find_by_name_kind(kernel, "rdtgroup_file_write", BTF_KIND_FUNC) > 0;
    settings->cgroup_moves = btf__find_by_name_kind(kernel, "cgroup_move_task", BTF_KIND_FUNC) > 0;
    btf__free(kernel);
    if (!has_rmid)
        return unavailable("no-resctrl", "the kernel has no function rdtgroup_file_write: it has no resctrl");
    error = remove_pins(NEW);
    if (error)
        return unavailable("no-permission", "cannot remove %s: %s", NEW, strerror(error));
    program = open_program(settings);
    error = program ? -bpf_object__load(program) : errno;
    if (!error && attach_and_pin(program, settings))
        error = errno;
    if (!error)
        error = publish();
    if (!error) {
        write_state("loaded", NULL, NULL);
        return 0;
    }
    remove_pins(NEW);
    if (is_locked_down())
        return unavailable("lockdown", "the kernel is locked down for confidentiality, see kernel_lockdown(7): %s",
                   strerror(error));
    if (error == EPERM || error == EACCES)
        return unavailable("no-permission", "loading needs CAP_BPF and CAP_PERFMON: %s: %s", strerror(error),
                   warning);
    return unavailable("refused", "the kernel refused the program: %s: %s", strerror(error), warning);
}

static int unload(void)
{
    int error = remove_pins(NEW);

    if (!error)
        error = remove_pins(FILES);
    if (error) {
        fprintf(stderr, "cannot remove the files in %s: %s\n", FILES, strerror(error));
        return 1;
    }
    unlink(STATE "/state");
    return 0;
}

static int usage(void)
{
    fputs("usage: resctrlmond-witness load [--rows N] [--moves N] [--keep SECONDS]\n"
          "       resctrlmond-witness unload\n",
          stderr);
    return 2;
}

int main(int count, char **words)
{
    static const struct option options[] = {
        {"rows", required_argument, NULL, 'r'},
        {"moves", required_argument, NULL, 'm'},
        {"keep", required_argument, NULL, 'k'},
        {0},
    };
    struct settings settings = {.rows = ROWS, .moves = MOVES, .keep = KEEP_S * NS_PER_S};
    char *end;
    int option;

    libbpf_set_print(keep_warning);
    while ((option = getopt_long(count, words, "", options, NULL)) != -1) {
        unsigned long number = option == '?' ? 0 : strtoul(optarg, &end, 10);

        if (!number || *end || number > 1 << 24)
            return usage();
        if (option == 'r')
            settings.rows = number;
        else if (option == 'm')
            settings.moves = number;
        else
            settings.keep = number * NS_PER_S;
    }
    if (count - optind != 1)
        return usage();
    if (!strcmp(words[optind], "load"))
        return load(&settings);
    if (!strcmp(words[optind], "unload"))
        return unload();
    return usage();
}
