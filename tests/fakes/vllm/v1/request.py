import enum


class RequestStatus(enum.IntEnum):
    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 3
    RUNNING = 5
    FINISHED_STOPPED = 7
    FINISHED_ABORTED = 9
    FINISHED_ERROR = 11
