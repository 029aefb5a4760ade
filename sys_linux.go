package nanny

import (
	"errors"
	"net"
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

// lend lets dnsmasq bind the port that conn has, too: both have SO_REUSEADDR then (socket(7)). What is sent there isn't for
// conn, which is connected to itself.
func lend(conn *net.UDPConn) error {
	return onFile(conn, func(fd int) error {
		self, err := unix.Getsockname(fd)
		if err != nil {
			return os.NewSyscallError("getsockname", err)
		}
		if err := unix.Connect(fd, self); err != nil {
			return os.NewSyscallError("connect", err)
		}
		return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	})
}

// reclaim ends what lend began: from now on nobody binds the port.
func reclaim(conn *net.UDPConn) error {
	return onFile(conn, func(fd int) error {
		return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 0))
	})
}

// onFile calls f with the file descriptor of conn.
func onFile(conn *net.UDPConn, f func(fd int) error) (err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); ctlErr != nil {
		return ctlErr
	}
	return err
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
