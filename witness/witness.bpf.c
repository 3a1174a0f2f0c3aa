// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Charge the CPU time of each task to the control group, the CLOSID and the RMID with which the task used it.
 *
 * A task's time is charged when its control group changes, before and after each write to a file "tasks" of resctrl that
 * names it, when it ends, and when the kernel frees it. The account of a task has the time that was charged before, so each
 * nanosecond is charged once. All that is charged is in the table "sums"; what is not yet charged is the difference of two
 * columns of the file "tasks".
 *
 * The files are iterators: reading one runs a program, which prints a line for each element. See resctrlmond-witness(8).
 */
#include <linux/types.h>

typedef __s64 s64;
typedef __u64 u64;
typedef __s32 s32;
typedef __u32 u32;

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "witness.h"

#define NS_PER_S 1000000000ULL
/* A write to a file of kernfs has at most PAGE_SIZE bytes; 64 KiB on some arm64 kernels. */
#define MAX_WRITE 65536
#define MAX_PID 4194304 /* PID_MAX_LIMIT of Linux */
#define EEXIST 17
#define NAME_MAX 255

/* The members that are used, of the kernel's structures. libbpf adjusts their offsets to the running kernel. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct kernfs_node {
    u64 id;
    const char *name;
};

struct kernfs_node___rcu {
    struct kernfs_node *__parent; /* since Linux 6.15 */
};

struct kernfs_node___plain {
    struct kernfs_node *parent;
};

struct kernfs_open_file {
    struct kernfs_node *kn;
};

struct cgroup;

struct cgroup_subsys_state {
    struct cgroup *cgroup;
    struct cgroup_subsys_state *parent;
};

struct cgroup_root {
    int hierarchy_id;
};

struct cgroup {
    struct cgroup_subsys_state self;
    int level;
    struct kernfs_node *kn;
    struct cgroup_root *root;
};

struct css_set {
    struct cgroup *dfl_cgrp;
};

struct sched_entity {
    u64 sum_exec_runtime;
};

struct pid {
    unsigned int level;
};

struct task_struct {
    int pid;
    int tgid;
    int exit_state;
    u64 start_boottime;
    struct css_set *cgroups;
    struct sched_entity se;
    struct pid *thread_pid;
};

struct task_struct___x86 {
    u32 closid;
    u32 rmid;
};

struct thread_info___mpam {
    u64 mpam_partid_pmg;
};

struct task_struct___mpam {
    struct thread_info___mpam thread_info;
};

struct seq_file;

struct bpf_iter_meta {
    struct seq_file *seq;
};

struct bpf_iter__task {
    struct bpf_iter_meta *meta;
    struct task_struct *task;
};

struct bpf_iter__bpf_map_elem {
    struct bpf_iter_meta *meta;
    void *key;
    void *value;
};

#pragma clang attribute pop

extern struct task_struct *bpf_task_from_vpid(s32 pid) __ksym __weak; /* since Linux 6.14 */
extern struct task_struct *bpf_task_from_pid(s32 pid) __ksym __weak; /* since Linux 6.2 */
extern void bpf_task_release(struct task_struct *task) __ksym __weak;

/* libbpf before 1.2 has no bpf_ksym_exists(). */
#define HAS(function) ((function) != 0)

struct rmid {
    u32 closid;
    u32 rmid;
};

struct key {
    u64 cgroup;
    struct rmid rmid;
};

struct row {
    u64 cpu_ns;
    u64 tasks; /* that ended here */
    u64 changed;
    u64 above[ANCESTORS]; /* control groups from the parent upwards; 0 above the root */
};

/* What was charged of the time of a task, and to which RMID it belonged then. */
struct account {
    u64 charged;
    u64 write; /* the number of the task's own write to a file of resctrl, 0 if it is in none */
    struct rmid rmid;
};

/* A control group that was removed. */
struct removal {
    u64 at;
    u64 parent;
    char name[NAME_MAX + 1];
};

enum kind { WRITE = 1, TASK };

struct move {
    u64 number; /* 0 while the record is incomplete */
    u64 at;
    u64 write; /* TASK: the number of the write */
    u64 directory;
    u64 duration;
    u64 start;
    u64 cgroup;
    u64 cpu_ns;
    s64 result;
    struct rmid old, new;
    u32 kind;
    u32 done; /* the write has returned */
    u32 unresolved;
    s32 tgid, tid;
    char comm[16];
    char file[32];
    char parent[TEXT]; /* the name of the file's directory */
    char text[TEXT];
};

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __type(key, u32);
    __type(value, struct settings);
} settings SEC(".maps");

/* Never LRU: a table that forgets cannot prove that nothing was there. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, 1);
    __type(key, struct key);
    __type(value, struct row);
} sums SEC(".maps");

/* The control groups that were removed. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, 1);
    __type(key, u64);
    __type(value, struct removal);
} removals SEC(".maps");

/*
 * By the address of the task's structure, from the first charge until the kernel frees the structure. Task storage has the
 * same life, but cannot be created on each CPU (since Linux 6.18, it needs cmpxchg16b).
 */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, 1);
    __type(key, u64);
    __type(value, struct account);
} accounts SEC(".maps");

/* A ring: the number of a move modulo the capacity is its index. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __type(key, u32);
    __type(value, struct move);
} ring SEC(".maps");

u64 lost_rows; /* charges for which the table had no place */
u64 lost_moves; /* writes to files "tasks" that succeeded although a task that they named was not found */
u64 lost_accounts; /* charges and writes of tasks for which the table of accounts had no place */
u64 lost_removals; /* removals of control groups for which the table had no place */
u64 rows_used;
u64 removals_used;
u64 moves_made;
u64 tidied;
u64 dropped; /* the newest removal whose rows or line were dropped */

static __always_inline struct settings *get_settings(void)
{
    u32 zero = 0;

    return bpf_map_lookup_elem(&settings, &zero);
}

static __always_inline void get_rmid(struct task_struct *task, struct rmid *rmid)
{
    if (bpf_core_field_exists(struct task_struct___x86, closid)) {
        struct task_struct___x86 *x86 = (void *)task;

        rmid->closid = x86->closid;
        rmid->rmid = x86->rmid;
    } else {
        /* As MPAM0_EL1: PARTID_D in bits 16 to 31, PMG_D in bits 40 to 47. */
        u64 both = ((struct task_struct___mpam *)task)->thread_info.mpam_partid_pmg;

        rmid->closid = both >> 16 & 0xffff;
        rmid->rmid = both >> 40 & 0xff;
    }
}

static __always_inline struct account *find_account(struct task_struct *task)
{
    u64 key = (u64)task;

    return bpf_map_lookup_elem(&accounts, &key);
}

static __always_inline struct account *get_account(struct task_struct *task)
{
    struct account *account = find_account(task), new = {};
    u64 key = (u64)task;

    if (account)
        return account;
    bpf_map_update_elem(&accounts, &key, &new, BPF_NOEXIST);
    account = bpf_map_lookup_elem(&accounts, &key);
    if (!account)
        __sync_fetch_and_add(&lost_accounts, 1);
    return account;
}

/* The control group of a task or, below ANCESTORS levels, the one above it on that level. NULL if it is too deep. */
static __always_inline struct cgroup *get_cgroup(struct task_struct *task)
{
    struct cgroup_subsys_state *at = &task->cgroups->dfl_cgrp->self;

    for (int i = 0; i < DEEPEST; i++) {
        if (!at || at->cgroup->level <= ANCESTORS)
            break;
        at = at->parent;
    }
    return at && at->cgroup->level <= ANCESTORS ? at->cgroup : 0;
}

/* Charge time to the row of the task's control group and RMID. */
static __always_inline void add(struct task_struct *task, u64 ns, u64 ended)
{
    struct row new = {.cpu_ns = ns, .tasks = ended, .changed = bpf_ktime_get_boot_ns()};
    struct cgroup *cgroup = get_cgroup(task);
    struct cgroup_subsys_state *above;
    struct key key = {};
    struct row *row;
    long error;

    if (!cgroup) {
        __sync_fetch_and_add(&lost_rows, 1);
        return;
    }
    above = &cgroup->self;
    key.cgroup = cgroup->kn->id;
    get_rmid(task, &key.rmid);
    row = bpf_map_lookup_elem(&sums, &key);
    if (!row) {
#pragma unroll
        for (int i = 0; i < ANCESTORS; i++) {
            above = above->parent;
            if (!above)
                break;
            new.above[i] = above->cgroup->kn->id;
        }
        error = bpf_map_update_elem(&sums, &key, &new, BPF_NOEXIST);
        if (!error) {
            __sync_fetch_and_add(&rows_used, 1);
            return;
        }
        /* Another processor may have added the row. */
        row = error == -EEXIST ? bpf_map_lookup_elem(&sums, &key) : 0;
        if (!row) {
            __sync_fetch_and_add(&lost_rows, 1);
            return;
        }
    }
    __sync_fetch_and_add(&row->cpu_ns, ns);
    if (ended)
        __sync_fetch_and_add(&row->tasks, 1);
    row->changed = new.changed;
}

/* Charge what the task has used since the last charge. Return its account, or NULL if there is no memory for one. */
static __always_inline struct account *charge(struct task_struct *task, u64 ended)
{
    struct account *account = get_account(task);
    u64 now = task->se.sum_exec_runtime, before;

    /* Without an account, the time is charged when the kernel frees the task, to the row that the task has then. */
    if (!account)
        return 0;
    before = __sync_lock_test_and_set(&account->charged, now);
    get_rmid(task, &account->rmid);
    if (now > before || ended)
        add(task, now > before ? now - before : 0, ended);
    return account;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_exit, struct task_struct *task)
{
    charge(task, 1);
    return 0;
}

/* The time after the exit's tracepoint, and since the last tick: the kernel has updated it when the task left its CPU. */
SEC("tp_btf/sched_process_free")
int BPF_PROG(on_free, struct task_struct *task)
{
    struct account *account = find_account(task);
    u64 before = account ? account->charged : 0, now = task->se.sum_exec_runtime, key = (u64)task;

    if (now > before)
        add(task, now - before, 0);
    bpf_map_delete_elem(&accounts, &key);
    return 0;
}

/* The kernel calls this function for each task that a control group gets, while the task is still in the old one. */
SEC("fentry/cgroup_move_task")
int BPF_PROG(on_cgroup_move, struct task_struct *task, struct css_set *to)
{
    /* A new task has not run yet. A change of cgroup.subtree_control moves tasks too, but into the same control group. */
    if (task->se.sum_exec_runtime && task->cgroups->dfl_cgrp->kn->id != to->dfl_cgrp->kn->id)
        charge(task, 0);
    return 0;
}

/* State that a removal is dropped, before it is: readers read the status last. Return 0 if another CPU states one now. */
static __always_inline int state_drop(u64 at)
{
    u64 newest = dropped;

    return newest >= at || __sync_bool_compare_and_swap(&dropped, newest, at);
}

static long drop_row(void *map, struct key *key, struct row *row, u64 *keep)
{
    struct removal *removal = bpf_map_lookup_elem(&removals, &key->cgroup);

    if (removal && bpf_ktime_get_boot_ns() - removal->at > *keep && state_drop(removal->at) &&
        !bpf_map_delete_elem(&sums, key))
        __sync_fetch_and_add(&rows_used, -1);
    return 0;
}

static long drop_removal(void *map, u64 *key, struct removal *removal, u64 *keep)
{
    if (bpf_ktime_get_boot_ns() - removal->at > *keep && state_drop(removal->at) && !bpf_map_delete_elem(&removals, key))
        __sync_fetch_and_add(&removals_used, -1);
    return 0;
}

/*
 * Record that a control group was removed. When one of the tables is three quarters full, drop the rows of the control
 * groups that were removed long ago; with the default of one hour, at most once a minute.
 */
SEC("tp_btf/cgroup_rmdir")
int BPF_PROG(on_rmdir, struct cgroup *cgroup)
{
    struct settings *setting = get_settings();
    u64 id = cgroup->kn->id, now = bpf_ktime_get_boot_ns(), last = tidied, keep;
    struct removal removal = {.at = now};

    /* Hierarchy 0 is that of cgroup v2. Others have inode numbers of their own. */
    if (!setting || cgroup->root->hierarchy_id)
        return 0;
    keep = setting->keep;
    removal.parent = cgroup->self.parent->cgroup->kn->id;
    bpf_probe_read_kernel_str(removal.name, sizeof(removal.name), cgroup->kn->name);
    if (!bpf_map_update_elem(&removals, &id, &removal, BPF_NOEXIST))
        __sync_fetch_and_add(&removals_used, 1);
    else
        __sync_fetch_and_add(&lost_removals, 1);
    if (rows_used * 4 < setting->rows * 3ULL && removals_used * 4 < setting->rows * 3ULL)
        return 0;
    if ((last && now - last < keep / 60) || !__sync_bool_compare_and_swap(&tidied, last, now))
        return 0;
    bpf_for_each_map_elem(&sums, drop_row, &keep, 0);
    bpf_for_each_map_elem(&removals, drop_removal, &keep, 0);
    return 0;
}

/* Begin a record in the ring, and store its number. The caller fills it and sets the number in the record at last. */
static __always_inline struct move *begin_move(u64 *number)
{
    struct settings *setting = get_settings();
    struct move *move;
    u32 index;

    *number = __sync_fetch_and_add(&moves_made, 1) + 1;
    if (!setting || !setting->moves)
        return 0;
    index = *number % setting->moves;
    move = bpf_map_lookup_elem(&ring, &index);
    if (move)
        __sync_lock_test_and_set(&move->number, 0);
    return move;
}

static __always_inline struct move *find_move(u64 number)
{
    struct settings *setting = get_settings();
    struct move *move;
    u32 index;

    if (!setting || !setting->moves)
        return 0;
    index = number % setting->moves;
    move = bpf_map_lookup_elem(&ring, &index);
    return move && move->number == number ? move : 0;
}

/* A scan of the text of a write: each task that it names, before and after the write. */
struct scan {
    const char *text;
    u64 length;
    u64 write;
    u64 pid;
    u32 is_number;
    u32 is_bad;
    u32 is_after;
    u32 unresolved;
};

static __always_inline void compare(struct scan *scan, struct task_struct *task)
{
    struct account *account = find_account(task);
    struct move *move;
    struct rmid rmid;
    u64 number;

    if (!account) {
        scan->unresolved++;
        return;
    }
    get_rmid(task, &rmid);
    if (rmid.closid == account->rmid.closid && rmid.rmid == account->rmid.rmid)
        return;
    move = begin_move(&number);
    if (move) {
        move->kind = TASK;
        move->at = bpf_ktime_get_boot_ns();
        move->write = scan->write;
        move->tgid = task->tgid;
        move->tid = task->pid;
        move->start = task->start_boottime;
        move->cgroup = task->cgroups->dfl_cgrp->kn->id;
        move->old = account->rmid;
        move->new = rmid;
        move->cpu_ns = account->charged;
        __sync_lock_test_and_set(&move->number, number);
    }
    account->rmid = rmid;
}

static __always_inline void look(struct scan *scan, struct task_struct *task)
{
    if (scan->is_after)
        compare(scan, task);
    else if (!charge(task, 0))
        scan->unresolved++;
}

/* Find a task by its ID in the PID namespace of the writer, as the kernel does. */
static __always_inline struct task_struct *find_task(struct scan *scan)
{
    if (HAS(bpf_task_from_vpid))
        return bpf_task_from_vpid(scan->pid);
    if (HAS(bpf_task_from_pid)) {
        if (bpf_get_current_task_btf()->thread_pid->level == 0)
            return bpf_task_from_pid(scan->pid);
    }
    scan->unresolved++;
    return 0;
}

static long scan_character(u64 index, struct scan *scan)
{
    struct task_struct *task;
    char c = 0;

    if (index < scan->length && bpf_probe_read_kernel(&c, 1, scan->text + index)) {
        scan->unresolved++;
        return 1;
    }
    if (c >= '0' && c <= '9') {
        /* The kernel reads a number that begins with 0 as octal or hexadecimal. */
        if (scan->pid > MAX_PID || (scan->is_number && !scan->pid))
            scan->is_bad = 1;
        else
            scan->pid = scan->pid * 10 + (c - '0');
        scan->is_number = 1;
        return 0;
    }
    /* The kernel has replaced commas by NUL after the write. */
    if (c != ',' && c != '\n' && c != ' ' && c != '\t' && c) {
        scan->is_bad = 1;
        return 0;
    }
    if (scan->is_bad) {
        scan->unresolved++;
    } else if (scan->is_number && !scan->pid) {
        look(scan, bpf_get_current_task_btf());
    } else if (scan->is_number) {
        task = find_task(scan);
        if (task) {
            look(scan, task);
            bpf_task_release(task);
        }
    }
    scan->pid = scan->is_number = scan->is_bad = 0;
    return 0;
}

static __always_inline u32 scan_text(const char *text, u64 length, u64 write, u32 is_after)
{
    struct scan scan = {.text = text, .length = length, .write = write, .is_after = is_after};

    if (length < MAX_WRITE)
        bpf_loop(length + 1, scan_character, &scan, 0);
    else
        scan.unresolved = 1;
    return scan.unresolved;
}

static __always_inline int has_name(struct kernfs_node *file, const char *expected)
{
    char name[16] = {};

    bpf_probe_read_kernel_str(name, sizeof(name), file->name);
    return !bpf_strncmp(name, sizeof(name), expected);
}

static __always_inline void begin_write(struct move *move, struct kernfs_node *file, const char *text)
{
    struct kernfs_node *directory;

    if (bpf_core_field_exists(struct kernfs_node___rcu, __parent))
        directory = ((struct kernfs_node___rcu *)file)->__parent;
    else
        directory = ((struct kernfs_node___plain *)file)->parent;
    move->kind = WRITE;
    move->at = bpf_ktime_get_boot_ns();
    move->directory = directory->id;
    move->duration = 0;
    move->result = 0;
    move->done = 0;
    move->unresolved = 0;
    move->tgid = bpf_get_current_pid_tgid() >> 32;
    move->tid = bpf_get_current_pid_tgid();
    bpf_get_current_comm(move->comm, sizeof(move->comm));
    bpf_probe_read_kernel_str(move->file, sizeof(move->file), file->name);
    bpf_probe_read_kernel_str(move->parent, sizeof(move->parent), directory->name);
    bpf_probe_read_kernel_str(move->text, sizeof(move->text), text);
}

/* The kernel calls this function for each write to a file of resctrl. */
SEC("fentry/rdtgroup_file_write")
int BPF_PROG(on_write, struct kernfs_open_file *file, char *text, u64 length)
{
    struct account *account;
    struct move *move;
    u64 number;

    /* Some programs write it each second. */
    if (has_name(file->kn, "schemata"))
        return 0;
    account = get_account(bpf_get_current_task_btf());
    move = begin_move(&number);
    if (account)
        account->write = number;
    if (move) {
        begin_write(move, file->kn, text);
        if (has_name(file->kn, "tasks"))
            move->unresolved = scan_text(text, length, number, 0);
        __sync_lock_test_and_set(&move->number, number);
    }
    return 0;
}

SEC("fexit/rdtgroup_file_write")
int BPF_PROG(on_written, struct kernfs_open_file *file, char *text, u64 length, s64 offset, s64 result)
{
    struct account *account = find_account(bpf_get_current_task_btf());
    u64 number = account ? account->write : 0;
    u32 of_tasks = has_name(file->kn, "tasks"), unresolved = 0;
    struct move *move;

    if (has_name(file->kn, "schemata"))
        return 0;
    if (number) {
        move = find_move(number);
        account->write = 0;
    } else {
        /* The kernel skips a program that it is already running on the same CPU: the time until now was not charged. */
        move = begin_move(&number);
        if (move) {
            begin_write(move, file->kn, text);
            move->unresolved = of_tasks;
            __sync_lock_test_and_set(&move->number, number);
        }
    }
    if (of_tasks)
        unresolved = scan_text(text, length, number, 1);
    /* The records of the tasks may have taken the place of the write's. */
    if (move && move->number == number) {
        /* A task that was not found before was moved: its time until now was not charged to its old RMID. */
        if (result > 0 && move->unresolved)
            __sync_fetch_and_add(&lost_moves, 1);
        move->duration = bpf_ktime_get_boot_ns() - move->at;
        move->result = result;
        if (unresolved > move->unresolved)
            move->unresolved = unresolved;
        __sync_lock_test_and_set(&move->done, 1);
    }
    return 0;
}

SEC("iter/task")
int tasks(struct bpf_iter__task *context)
{
    struct seq_file *seq = context->meta->seq;
    struct task_struct *task = context->task;
    struct cgroup_subsys_state *above;
    struct account *account;
    struct cgroup *cgroup;
    struct rmid rmid;
    u64 charged, used;

    if (!task)
        return 0;
    /* Before the time that was used, which only grows. */
    account = find_account(task);
    charged = account ? account->charged : 0;
    used = task->se.sum_exec_runtime;
    get_rmid(task, &rmid);
    cgroup = get_cgroup(task);
    if (!cgroup)
        return 0;
    BPF_SEQ_PRINTF(seq, "%d %d %llu %u %u %llu %llu %d %llu", task->tgid, task->pid, task->start_boottime,
               rmid.closid, rmid.rmid, used, charged, task->exit_state != 0, cgroup->kn->id);
    above = &cgroup->self;
    for (int i = 0; i < ANCESTORS; i++) {
        above = above->parent;
        if (!above)
            break;
        BPF_SEQ_PRINTF(seq, ",%llu", above->cgroup->kn->id);
    }
    BPF_SEQ_PRINTF(seq, "\n");
    return 0;
}

SEC("iter/bpf_map_elem")
int ended(struct bpf_iter__bpf_map_elem *context)
{
    struct seq_file *seq = context->meta->seq;
    struct key *key = context->key;
    struct row *row = context->value;

    if (!key || !row)
        return 0;
    BPF_SEQ_PRINTF(seq, "%u %u %llu %llu %llu %llu", key->rmid.closid, key->rmid.rmid, row->cpu_ns, row->tasks,
               row->changed, key->cgroup);
#pragma unroll
    for (int i = 0; i < ANCESTORS; i++) {
        if (!row->above[i])
            break;
        BPF_SEQ_PRINTF(seq, ",%llu", row->above[i]);
    }
    BPF_SEQ_PRINTF(seq, "\n");
    return 0;
}

SEC("iter/bpf_map_elem")
int removed(struct bpf_iter__bpf_map_elem *context)
{
    struct seq_file *seq = context->meta->seq;
    struct removal *removal = context->value;
    u64 *id = context->key;

    if (!id || !removal)
        return 0;
    BPF_SEQ_PRINTF(seq, "%llu %llu %llu %s\n", *id, removal->at, removal->parent, removal->name);
    return 0;
}

/* Make a text one word. */
#define MAKE_WORD(text)                                                    \
    _Pragma("unroll") for (int i = 0; i < (int)sizeof(text) - 1; i++) \
    {                                                                  \
        if (text[i] && (text[i] <= ' ' || text[i] > '~'))          \
            text[i] = text[i] == '\n' && !text[i + 1] ? 0 : '?';  \
    }

SEC("iter/bpf_map_elem")
int moves(struct bpf_iter__bpf_map_elem *context)
{
    struct seq_file *seq = context->meta->seq;
    struct move *place = context->value;
    struct move move;

    if (!place || !place->number)
        return 0;
    __builtin_memcpy(&move, place, sizeof(move));
    /* Another record may have begun meanwhile: this one is lost, and its number is missing. */
    barrier();
    if (*(volatile u64 *)&place->number != move.number)
        return 0;
    if (move.kind == TASK) {
        BPF_SEQ_PRINTF(seq, "%llu task %llu %llu %d %d %llu %llu", move.number, move.at, move.write, move.tgid,
                   move.tid, move.start, move.cgroup);
        BPF_SEQ_PRINTF(seq, " %u %u %u %u %llu\n", move.old.closid, move.old.rmid, move.new.closid,
                   move.new.rmid, move.cpu_ns);
        return 0;
    }
    MAKE_WORD(move.comm);
    MAKE_WORD(move.file);
    MAKE_WORD(move.parent);
    MAKE_WORD(move.text);
    BPF_SEQ_PRINTF(seq, "%llu write %llu %llu ", move.number, move.at, move.directory);
    if (move.done)
        BPF_SEQ_PRINTF(seq, "%lld %llu", move.result, move.duration);
    else
        BPF_SEQ_PRINTF(seq, "- -");
    /* The root of resctrl has no name. */
    if (!move.parent[0])
        move.parent[0] = '/';
    BPF_SEQ_PRINTF(seq, " %u %d %d %s %s %s %s\n", move.unresolved, move.tgid, move.tid, move.comm, move.file,
               move.parent, move.text);
    return 0;
}

SEC("iter/bpf_map_elem")
int status(struct bpf_iter__bpf_map_elem *context)
{
    struct seq_file *seq = context->meta->seq;
    struct settings *setting = context->value;

    if (!setting)
        return 0;
    BPF_SEQ_PRINTF(seq, "format %d\nbegun %llu\ngaps %llu %llu %llu %llu\n", FORMAT, setting->begun, lost_rows,
               lost_accounts, lost_moves, lost_removals);
    BPF_SEQ_PRINTF(seq, "rows %llu %u\nmoves %llu %u\nkeep %llu\n", rows_used, setting->rows, moves_made,
               setting->moves, setting->keep / NS_PER_S);
    BPF_SEQ_PRINTF(seq, "dropped %llu\ncgroup_moves %u\ntask_moves %u\n", dropped, setting->cgroup_moves,
               setting->task_moves);
    return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
