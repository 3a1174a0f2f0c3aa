// SPDX-License-Identifier: Apache-2.0
/* Mount a look-alike of resctrl with constant counters, for benchmarks only: constant-resctrl MOUNTPOINT
 *
 * It speaks the protocol of /dev/fuse itself (linux/fuse.h), in one thread. It prints a line when it is mounted and ends
 * with standard input. Groups can be created, renamed and removed, and tasks moved; nothing is checked or counted.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define RMIDS 1024
#define MOST_TASKS 65536

struct node {
    struct node *parent, *children, *next;
    const char *text; /* of a file; NULL of tasks */
    char name[256];
    unsigned long inode;
    unsigned mode, gid, links;
    uint64_t mtime, mtime_ns;
    bool is_removed, is_group;
};

static struct node *root, *mon_groups;
static struct node *group_of[1 << 22]; /* by thread ID, at most PID_MAX_LIMIT; NULL is the root class */
static bool has_forked; /* whether a fork was reported */
static int last_tid; /* the highest thread ID that was moved: the kernel walks over threads, not over numbers */
static unsigned long inodes = 1;
static unsigned groups;
static int device;

static struct node *add(struct node *parent, const char *name, unsigned mode, const char *text)
{
    struct node *node = calloc(1, sizeof *node);
    if (!node)
        abort();
    *node = (struct node){.parent = parent, .text = text, .mode = mode, .inode = inodes++, .links = 1};
    snprintf(node->name, sizeof node->name, "%s", name);
    if (S_ISDIR(mode))
        node->links = 2;
    if (parent) {
        struct node **end = &parent->children;
        while (*end)
            end = &(*end)->next;
        *end = node;
        parent->links += S_ISDIR(mode);
        node->gid = parent->gid;
    }
    return node;
}

static struct node *directory(struct node *parent, const char *name)
{
    return add(parent, name, S_IFDIR | 0755, NULL);
}

static void file(struct node *parent, const char *name, const char *text)
{
    add(parent, name, S_IFREG | 0444, text);
}

static void fill(struct node *group)
{
    add(group, "tasks", S_IFREG | 0644, NULL);
    file(group, "cpus", "0\n");
    file(group, "cpus_list", "\n");
    struct node *data = directory(group, "mon_data");
    const char *domains[] = {"mon_L3_00", "mon_L3_01", "mon_PERF_PKG_00", "mon_PERF_PKG_01"};
    for (int i = 0; i < 4; i++) {
        struct node *domain = directory(data, domains[i]);
        if (i < 2) {
            file(domain, "llc_occupancy", "1048576\n");
            file(domain, "mbm_total_bytes", "123456789012\n");
            file(domain, "mbm_local_bytes", "12345678901\n");
        } else {
            file(domain, "core_energy", "12345.678901\n");
            file(domain, "activity", "2345.678901\n");
        }
    }
}

static void give(struct node *node, unsigned gid)
{
    node->gid = gid;
    for (struct node *child = node->children; child; child = child->next)
        give(child, gid);
}

static void detach(struct node *node)
{
    struct node **link = &node->parent->children;
    while (*link != node)
        link = &(*link)->next;
    *link = node->next;
    node->next = NULL;
    node->parent->links -= S_ISDIR(node->mode);
}

static void mark_removed(struct node *node)
{
    node->is_removed = true;
    for (struct node *child = node->children; child; child = child->next)
        mark_removed(child);
}

static struct node *child_of(struct node *parent, const char *name)
{
    for (struct node *child = parent->children; child; child = child->next)
        if (!strcmp(child->name, name))
            return child;
    return NULL;
}

/* -- replies */

static void reply(uint64_t unique, int error, const void *data, size_t size)
{
    static char buffer[sizeof(struct fuse_out_header) + FUSE_MIN_READ_BUFFER + (1 << 20)];
    struct fuse_out_header header = {.len = sizeof header + size, .error = -error, .unique = unique};
    memcpy(buffer, &header, sizeof header);
    if (size)
        memcpy(buffer + sizeof header, data, size);
    if (write(device, buffer, header.len) < 0 && errno != ENOENT) /* ENOENT: the caller was interrupted */
        _exit(errno != ENODEV);
}

static struct fuse_attr attributes(struct node *node)
{
    return (struct fuse_attr){.ino = node->inode, .mode = node->mode, .nlink = node->links, .gid = node->gid,
                              .mtime = node->mtime, .mtimensec = node->mtime_ns, .blksize = 4096};
}

static uint64_t id_of(struct node *node)
{
    return node == root ? FUSE_ROOT_ID : (uint64_t)(uintptr_t)node;
}

static void reply_entry(uint64_t unique, struct node *node)
{
    struct fuse_entry_out out = {.nodeid = id_of(node), .entry_valid = 3600, .attr_valid = 3600,
                                 .attr = attributes(node)};
    reply(unique, 0, &out, sizeof out);
}

static void reply_attributes(uint64_t unique, struct node *node)
{
    struct fuse_attr_out out = {.attr_valid = 0, .attr = attributes(node)};
    reply(unique, 0, &out, sizeof out);
}

static void list(uint64_t unique, struct node *node, const struct fuse_read_in *in)
{
    char out[65536];
    size_t used = 0, number = 0;
    for (struct node *child = node->children; child; child = child->next, number++) {
        size_t length = strlen(child->name), size = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + length);
        if (number < in->offset)
            continue;
        if (used + size > in->size || used + size > sizeof out)
            break;
        struct fuse_dirent entry = {.ino = child->inode, .off = number + 1, .namelen = length,
                                    .type = (child->mode & S_IFMT) >> 12};
        memset(out + used, 0, size);
        memcpy(out + used, &entry, FUSE_NAME_OFFSET);
        memcpy(out + used + FUSE_NAME_OFFSET, child->name, length);
        used += size;
    }
    reply(unique, 0, out, used);
}

static void read_file(uint64_t unique, struct node *node, const struct fuse_read_in *in)
{
    static char tasks[MOST_TASKS * 8];
    const char *text = node->text;
    if (node->is_removed) {
        reply(unique, ENODEV, NULL, 0);
        return;
    }
    if (!text) {
        size_t used = 0;
        tasks[0] = 0;
        for (int tid = 1; node->parent != root && tid <= last_tid && used < sizeof tasks - 16; tid++)
            if (group_of[tid] == node->parent && (!kill(tid, 0) || errno == EPERM))
                used += sprintf(tasks + used, "%d\n", tid);
        text = tasks;
    }
    size_t length = strlen(text);
    size_t from = in->offset < length ? in->offset : length;
    reply(unique, 0, text + from, length - from < in->size ? length - from : in->size);
}

static void write_tasks(uint64_t unique, struct node *node, const struct fuse_write_in *in)
{
    char text[32] = "";
    memcpy(text, in + 1, in->size < sizeof text ? in->size : sizeof text - 1);
    long tid = strtol(text, NULL, 10);
    struct fuse_write_out out = {.size = in->size};
    if (node->is_removed || tid < 0 || tid >= 1 << 22)
        reply(unique, node->is_removed ? ENODEV : ESRCH, NULL, 0);
    else {
        group_of[tid] = node->parent == root ? NULL : node->parent;
        last_tid = tid > last_tid ? tid : last_tid;
        reply(unique, 0, &out, sizeof out);
    }
}

/* A child that has not been reported yet (see inherit()) is in the group of its parent. */
static struct node *group_of_task(long tid)
{
    char path[32], stat[512] = "", *end;
    int parent = 0;
    if (group_of[tid] || !has_forked)
        return group_of[tid];
    snprintf(path, sizeof path, "/proc/%ld/stat", tid);
    FILE *file = fopen(path, "re");
    if (!file)
        return NULL;
    if (fgets(stat, sizeof stat, file) && (end = strrchr(stat, ')')))
        sscanf(end, ") %*c %d", &parent);
    fclose(file);
    return parent > 0 && parent < 1 << 22 ? group_of[parent] : NULL;
}

static void get_attribute(uint64_t unique, struct node *node, const struct fuse_getxattr_in *in)
{
    const char *name = (const char *)(in + 1);
    char value[512];
    long tid;
    if (node != root) {
        reply(unique, EOPNOTSUPP, NULL, 0);
        return;
    }
    if (!strcmp(name, "user.resctrlmond.simulation"))
        strcpy(value, "constant");
    else if (!strcmp(name, "user.resctrlmond.modalias"))
        strcpy(value, "cpu:type:x86,ven0000fam0006mod0001:feature:\n");
    else if (!strcmp(name, "user.resctrlmond.inexact"))
        value[0] = 0;
    else if (sscanf(name, "user.resctrlmond.task.%ld", &tid) == 1 && tid > 0 && tid < 1 << 22 &&
             (!kill(tid, 0) || errno == EPERM)) {
        struct node *group = group_of_task(tid);
        snprintf(value, sizeof value, "res:/\nmon:%s\n", group ? group->name : "");
    } else {
        reply(unique, ENODATA, NULL, 0);
        return;
    }
    size_t length = strlen(value);
    struct fuse_getxattr_out size = {.size = length};
    if (!in->size)
        reply(unique, 0, &size, sizeof size);
    else
        reply(unique, in->size < length ? ERANGE : 0, value, in->size < length ? 0 : length);
}

/* -- changes */

/* A process tells by setxattr(2) that it has forked: user.resctrlmond.fork.CHILD on the root, its value is the parent. */
static int inherit(struct node *node, const struct fuse_setxattr_in *in)
{
    const char *name = (const char *)in + FUSE_COMPAT_SETXATTR_IN_SIZE;
    char parent[16] = "";
    long tid;
    if (node != root || sscanf(name, "user.resctrlmond.fork.%ld", &tid) != 1 || in->size >= sizeof parent)
        return EOPNOTSUPP;
    memcpy(parent, name + strlen(name) + 1, in->size);
    long from = strtol(parent, NULL, 10);
    if (tid <= 0 || tid >= 1 << 22 || from <= 0 || from >= 1 << 22)
        return ESRCH;
    has_forked = true;
    group_of[tid] = group_of[from];
    last_tid = tid > last_tid ? tid : last_tid;
    return 0;
}

static void make_group(const struct fuse_in_header *head, struct node *parent, const char *name)
{
    if (parent != mon_groups || groups == RMIDS) {
        reply(head->unique, parent == mon_groups ? ENOSPC : EPERM, NULL, 0);
        return;
    }
    struct node *group = directory(parent, name);
    group->is_group = true;
    groups++;
    fill(group);
    give(group, head->gid);
    reply_entry(head->unique, group);
}

static int remove_group(struct node *parent, const char *name)
{
    struct node *node = child_of(parent, name);
    if (!node)
        return ENOENT;
    if (!node->is_group)
        return EPERM;
    detach(node);
    mark_removed(node); /* never freed, because its number may still be asked for */
    groups--;
    for (int tid = 1; tid <= last_tid; tid++)
        if (group_of[tid] == node)
            group_of[tid] = NULL;
    return 0;
}

static int rename_group(struct node *from, const char *old, struct node *to, const char *new)
{
    struct node *node = child_of(from, old);
    if (!node)
        return ENOENT;
    if (!node->is_group || to != from)
        return EPERM;
    if (child_of(to, new))
        return EEXIST;
    snprintf(node->name, sizeof node->name, "%s", new);
    return 0;
}

static void serve(const struct fuse_in_header *head)
{
    const void *in = head + 1;
    struct node *node = head->nodeid == FUSE_ROOT_ID ? root : (struct node *)(uintptr_t)head->nodeid;
    struct node *child;
    struct fuse_open_out opened = {.open_flags = FOPEN_DIRECT_IO};
    const struct fuse_setattr_in *set = in;
    switch (head->opcode) {
    case FUSE_INIT: {
        const struct fuse_init_in *init = in;
        struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION,
                                    .max_readahead = init->max_readahead, .max_write = 4096, .max_background = 64,
                                    .congestion_threshold = 48, .time_gran = 1};
        reply(head->unique, 0, &out, sizeof out);
        puts("mounted");
        fflush(stdout);
        return;
    }
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        return;
    case FUSE_LOOKUP:
        if ((child = child_of(node, in)))
            reply_entry(head->unique, child);
        else
            reply(head->unique, ENOENT, NULL, 0);
        return;
    case FUSE_SETATTR:
        if (set->valid & FATTR_MTIME)
            node->mtime = set->mtime, node->mtime_ns = set->mtimensec;
        if (set->valid & FATTR_GID)
            node->gid = set->gid;
        if (set->valid & FATTR_MODE)
            node->mode = (node->mode & S_IFMT) | (set->mode & 07777);
        /* fall through */
    case FUSE_GETATTR:
        reply_attributes(head->unique, node);
        return;
    case FUSE_OPEN:
    case FUSE_OPENDIR:
        opened.open_flags = head->opcode == FUSE_OPEN ? FOPEN_DIRECT_IO : 0;
        reply(head->unique, 0, &opened, sizeof opened);
        return;
    case FUSE_READDIR:
        list(head->unique, node, in);
        return;
    case FUSE_READ:
        read_file(head->unique, node, in);
        return;
    case FUSE_WRITE:
        write_tasks(head->unique, node, in);
        return;
    case FUSE_GETXATTR:
        get_attribute(head->unique, node, in);
        return;
    case FUSE_SETXATTR:
        reply(head->unique, inherit(node, in), NULL, 0);
        return;
    case FUSE_MKDIR:
        make_group(head, node, (const char *)((const struct fuse_mkdir_in *)in + 1));
        return;
    case FUSE_RMDIR:
        reply(head->unique, remove_group(node, in), NULL, 0);
        return;
    case FUSE_RENAME2: {
        const struct fuse_rename2_in *names = in;
        const char *old = (const char *)(names + 1);
        struct node *to = names->newdir == FUSE_ROOT_ID ? root : (struct node *)(uintptr_t)names->newdir;
        reply(head->unique, rename_group(node, old, to, old + strlen(old) + 1), NULL, 0);
        return;
    }
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
        reply(head->unique, 0, NULL, 0);
        return;
    default:
        reply(head->unique, ENOSYS, NULL, 0);
    }
}

int main(int argc, char **argv)
{
    static char request[FUSE_MIN_READ_BUFFER + (1 << 20)] __attribute__((aligned(8)));
    char options[128];
    if (argc != 2)
        return fputs("usage: constant-resctrl MOUNTPOINT\n", stderr), 2;
    root = directory(NULL, "");
    struct node *info = directory(root, "info");
    struct node *l3 = directory(info, "L3_MON"), *package = directory(info, "PERF_PKG_MON");
    file(info, "last_cmd_status", "ok\n");
    file(l3, "num_rmids", "1024\n");
    file(l3, "mon_features", "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n");
    file(l3, "max_threshold_occupancy", "65536\n");
    file(package, "num_rmids", "1024\n");
    file(package, "mon_features", "core_energy\nactivity\n");
    file(root, "mode", "shareable\n");
    file(root, "schemata", "L3:0=ffff;1=ffff\n");
    mon_groups = directory(root, "mon_groups");
    fill(root);
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions", device);
    if (device < 0 || mount("resctrlmond-sim", argv[1], "fuse.resctrlmond-sim", MS_NOSUID | MS_NODEV, options)) {
        perror(argv[1]);
        return 1;
    }
    struct pollfd polled[] = {{.fd = 0, .events = POLLIN}, {.fd = device, .events = POLLIN}};
    while (poll(polled, 2, -1) > 0 && !polled[0].revents) {
        ssize_t size = read(device, request, sizeof request);
        if (size < 0 && errno == ENODEV)
            return 0; /* unmounted */
        if (size > 0)
            serve((const struct fuse_in_header *)request);
    }
    return umount2(argv[1], MNT_DETACH) != 0;
}
