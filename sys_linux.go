package nanny

import (
	"errors"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// sysProcAttr gives the child a process group of its own, the parent-death signal and its user from its
// start: dnsmasq would lose that signal if it changed its user itself.
func (p privileges) sysProcAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM, AmbientCaps: p.caps}
	if p.switchUser {
		attr.Credential = &syscall.Credential{Uid: p.uid, Gid: p.gid}
	}
	return attr
}

// reserve finds a port of 127.0.0.1 that is free for UDP and TCP and keeps it from everybody, and from what the kernel
// gives to clients, but those who set SO_REUSEADDR as dnsmasq does (socket(7)). release ends that.
func reserve() (addr netip.AddrPort, release func(), err error) {
	var fds []int
	closeAll := func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	sa := &unix.SockaddrInet4{Addr: loopback.As4()}
	// TCP first: what has been closed there keeps its port for a minute, and the kernel knows which are left.
	for _, typ := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
		fd, err := unix.Socket(unix.AF_INET, typ|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return addr, nil, os.NewSyscallError("socket", err)
		}
		fds = append(fds, fd)
		// Not before bind: it would succeed beside another who has set it.
		if err := unix.Bind(fd, sa); err != nil {
			return addr, nil, os.NewSyscallError("bind", err)
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return addr, nil, os.NewSyscallError("setsockopt", err)
		}
		name, err := unix.Getsockname(fd)
		if err != nil {
			return addr, nil, os.NewSyscallError("getsockname", err)
		}
		sa.Port = name.(*unix.SockaddrInet4).Port
	}
	// What is sent to the child is not for the socket that holds its port: that one hears only itself.
	if err := unix.Connect(fds[1], sa); err != nil {
		return addr, nil, os.NewSyscallError("connect", err)
	}
	return netip.AddrPortFrom(loopback, uint16(sa.Port)), closeAll, nil
}

// waitExit returns when the process has ended, without reaping it (waitid(2), WNOWAIT).
func waitExit(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}

// isMountPoint tells whether path is where something is mounted. Kernels before 5.8 don't tell.
func isMountPoint(path string) bool {
	var st unix.Statx_t
	return unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_TYPE, &st) == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// ownCapabilities returns the effective and permitted capabilities of this process as bit sets.
func ownCapabilities() (effective, permitted uint64) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return 0, 0
	}
	return uint64(data[0].Effective) | uint64(data[1].Effective)<<32,
		uint64(data[0].Permitted) | uint64(data[1].Permitted)<<32
}

const (
	capKill           = unix.CAP_KILL
	capSetgid         = unix.CAP_SETGID
	capSetuid         = unix.CAP_SETUID
	capNetBindService = unix.CAP_NET_BIND_SERVICE
	capNetAdmin       = unix.CAP_NET_ADMIN
	capNetRaw         = unix.CAP_NET_RAW
)
