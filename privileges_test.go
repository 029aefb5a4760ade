package nanny

import (
	"os"
	"testing"
)

// TestRootOnlyByArgs: who can write the directory can't make dnsmasq run as root.
func TestRootOnlyByArgs(t *testing.T) {
	watched, err := findPrivileges([]directive{{"a.conf", 1, "user", "root"}, {"a.conf", 2, "group", "root"}}, 1024)
	if err != nil || len(watched.warnings) != 2 {
		t.Errorf("got %d warnings, error %v; want 2", len(watched.warnings), err)
	}
	if os.Geteuid() != 0 {
		return // the child's user is CoreDNS's anyway
	}
	if !watched.switchUser || watched.uid == 0 {
		t.Errorf("in the directory: got user %d (switched: %t), want another than root", watched.uid, watched.switchUser)
	}
	args, err := findPrivileges([]directive{{argsFile, 1, "user", "root"}, {argsFile, 2, "group", "root"}}, 1024)
	if err != nil || args.switchUser {
		t.Errorf("in args: switched to user %d, error %v; want root", args.uid, err)
	}
}
