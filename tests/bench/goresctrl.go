// SPDX-License-Identifier: Apache-2.0

// The life of a monitoring group by goresctrl: for each line "NAME PID" of standard input it creates the group in the
// root class, reads its counters, adds the process, reads the counters again and removes the group, then prints the
// microseconds of these three verbs: create with its reading, add, and remove with its reading.
package main

import (
	"bufio"
	"fmt"
	"io"
	stdlog "log"
	"os"
	"strings"
	"time"

	"github.com/intel/goresctrl/pkg/log"
	"github.com/intel/goresctrl/pkg/rdt"
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "goresctrl:", err)
		os.Exit(1)
	}
}

func main() {
	rdt.SetLogger(log.NewLoggerWrapper(stdlog.New(io.Discard, "", 0)))
	must(rdt.Initialize(""))
	root, found := rdt.GetClass(rdt.RootClassName)
	if !found {
		must(fmt.Errorf("there is no root class"))
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		began := time.Now()
		group, err := root.CreateMonGroup(words[0], nil)
		must(err)
		read(group)
		created := time.Now()
		must(group.AddPids(words[1]))
		added := time.Now()
		read(group)
		must(root.DeleteMonGroup(words[0]))
		ended := time.Now()
		fmt.Println(created.Sub(began).Microseconds(), added.Sub(created).Microseconds(), ended.Sub(added).Microseconds())
	}
	must(lines.Err())
}

func read(group rdt.MonGroup) {
	if len(group.GetMonData().L3) == 0 {
		must(fmt.Errorf("no counters were read"))
	}
}
