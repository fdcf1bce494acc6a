"""`pccheckctl doctor`: does this machine let PCcheck keep its promises?"""
