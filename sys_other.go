//go:build !linux

package nanny

import (
	"net"
	"syscall"
)

// sysProcAttr gives the child a process group of its own. There is no parent-death signal here: a CoreDNS that
// is killed leaves its dnsmasq behind.
func (p privileges) sysProcAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true}
	if p.switchUser {
		attr.Credential = &syscall.Credential{Uid: p.uid, Gid: p.gid}
	}
	return attr
}

// lend gives the port of conn up: SO_REUSEADDR isn't the same on all systems.
func lend(conn *net.UDPConn) error { return conn.Close() }

func reclaim(*net.UDPConn) error { return nil }

// waitExit does nothing: exec.Cmd.Wait waits and reaps at once.
func waitExit(int) {}

// isMountPoint: a single file is mounted in containers, on Linux.
func isMountPoint(string) bool { return false }

// ownCapabilities: root may do everything here, anybody else nothing.
func ownCapabilities() (effective, permitted uint64) {
	if syscall.Geteuid() == 0 {
		return ^uint64(0), ^uint64(0)
	}
	return 0, 0
}

const (
	capKill = iota
	capSetgid
	capSetuid
	capNetBindService
	capNetAdmin
	capNetRaw
)
