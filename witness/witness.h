/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the program in the kernel and its loader share. */
#ifndef WITNESS_H
#define WITNESS_H

/* The version of the files, and of the meaning of each column. A loader keeps a program of the same version. */
#ifndef FORMAT
#define FORMAT 4
#endif

/* Control groups above the control group of a row: use below that many levels is counted on that level. */
#define ANCESTORS 16

/* How many levels more a control group can have: the use of tasks that are deeper is a gap. */
#define DEEPEST 128

/* The bytes of a write that are kept. */
#define TEXT 64

struct settings {
    unsigned long long begun; /* boot time in ns at which the last program was attached */
    unsigned long long keep; /* ns for which the rows of a removed control group stay */
    unsigned int rows; /* capacity of the tables of sums, of accounts and of removals */
    unsigned int moves; /* capacity of the ring of moves */
    unsigned int cgroup_moves; /* whether a program sees each change of a task's control group */
    unsigned int task_moves; /* whether a program can find the tasks that a write names */
};

#endif
