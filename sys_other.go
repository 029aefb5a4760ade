//go:build !linux

package nanny

import (
	"net"
	"net/netip"
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

// reserve finds a port of 127.0.0.1 that is free for UDP and TCP. It isn't kept: SO_REUSEADDR isn't the same everywhere.
func reserve() (netip.AddrPort, func(), error) {
	tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(loopback, 0)))
	if err != nil {
		return netip.AddrPort{}, nil, err
	}
	defer tcp.Close()
	addr := tcp.Addr().(*net.TCPAddr).AddrPort()
	udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(addr))
	if err != nil {
		return netip.AddrPort{}, nil, err
	}
	return addr, func() {}, udp.Close()
}

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
